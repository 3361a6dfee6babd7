"""Text from a trained model, in the layout it was trained in."""
