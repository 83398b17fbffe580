"""Numbers: elements of the narrow formats, and arrays quantised into blocks of them."""
