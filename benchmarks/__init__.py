"""Benchmarks of vitserve on the CPU, alone and beside its peers. See README.md."""
