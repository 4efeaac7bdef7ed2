"""Parts of a checkpoint, on their way into a store and back."""
