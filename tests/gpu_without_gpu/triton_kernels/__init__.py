"""Our Triton kernels on the CPU: by the interpreter, and through the compiler. `make triton`."""
