"""Names of torchvision's input and output."""

ImageReadMode = decode_image = decode_jpeg = None
