//! The program `wholemem`.

#![forbid(unsafe_code)]

fn main() {}
