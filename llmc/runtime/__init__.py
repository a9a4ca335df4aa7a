"""Run engines: schedule, execute, sample. Nothing here needs the model, and only the reference executor needs torch."""
