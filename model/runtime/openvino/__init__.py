"""The backend that runs the network in OpenVINO on the CPU."""
