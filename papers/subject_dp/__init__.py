"""What privacy of people costs: biases of items under noise per item, user and subject."""
