"""What several kinds of work do with pictures, by Pillow. Only the child processes of workers import it."""
