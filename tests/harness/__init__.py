"""What the tests stand on: gloo workers that outlive a test, and named tolerances."""
