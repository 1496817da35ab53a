"""Benchmarks of vitserve on the CPU, alone and compared with its peers. See README.md."""
