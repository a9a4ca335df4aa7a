"""What benchmarks/gpu_suite.py runs in processes of their own: each prints a line of JSON for each measurement."""
