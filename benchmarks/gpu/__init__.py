"""Measurements on machines with GPUs: `make gpu`."""
