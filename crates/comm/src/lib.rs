//! Ranks that find, trust and watch each other, and pass bytes and file descriptors.

#![forbid(unsafe_code)]
#![allow(dead_code)]

mod error;
mod machine;
mod rank;

pub use error::{Error, Result};
pub use rank::Rank;
