"""What the tests are built on: gloo workers that outlive a test, and named tolerances."""
