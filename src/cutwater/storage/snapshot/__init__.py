"""What a checkpoint consists of, on its way into a store and back."""
