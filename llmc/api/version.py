"""The version of llmc, which engines and caches carry."""

VERSION = "0.1.0"
