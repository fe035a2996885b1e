"""Pictures: resize, compress, WebP; and the rows of uploads."""
