"""State outside of the device: host memory and files."""
