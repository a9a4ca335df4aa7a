"""Run engines: schedule, execute, sample. Nothing here needs the model or, but for the reference executor, torch."""
