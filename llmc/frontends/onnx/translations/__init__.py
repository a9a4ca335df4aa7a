"""One file a family of operators: from (domain, name) to what it is in torch's and llmc's operators."""
