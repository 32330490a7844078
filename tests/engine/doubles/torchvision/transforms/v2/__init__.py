"""Names of torchvision's second transforms."""
