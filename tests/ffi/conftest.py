"""Custom calls on the CPU platform end in the recording driver."""

import recording

driver = recording.driver
