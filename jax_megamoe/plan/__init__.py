"""Launch planning: pure Python from ints to frozen dataclasses."""
