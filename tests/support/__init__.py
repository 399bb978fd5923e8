"""What tests stand on: real servers, real processes, waiting for conditions."""
