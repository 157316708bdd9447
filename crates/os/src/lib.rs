//! The safe interface over devices.
