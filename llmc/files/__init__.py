"""Files and directories that others may write at the same time, or that are not what they should be."""
