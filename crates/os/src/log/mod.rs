//! Logging for programs: the filter that `WHOLEMEM_LOG` sets, and a subscriber that passes `tracing` events to a sink.
//!
//! The crates of this workspace emit events of `tracing` and never install a subscriber. A program that uses them
//! installs its own, or [`LogSubscriber`], which is small: it has no spans and no time stamps, and needs no further
//! crate. An event that no subscriber wants costs one relaxed load of the maximum level.
//!
//! ```
//! use wholemem_os::log::{LogFilter, LogLevel};
//!
//! let filter: LogFilter = "warn,wholemem::collective=debug".parse()?;
//! assert_eq!(filter.level_of("wholemem::collective"), LogLevel::DEBUG);
//! assert_eq!(filter.level_of("wholemem_hal::cuda"), LogLevel::WARN);
//!
//! let error = "verbose".parse::<LogFilter>().unwrap_err();
//! assert!(error.to_string().starts_with("`verbose` is neither a level"));
//! # Ok::<(), wholemem_os::log::BadLogFilter>(())
//! ```

mod filter;
mod subscriber;

pub use filter::{BadLogFilter, BadLogVariable, LOG_VARIABLE, LogFilter};
pub use subscriber::{LogRecord, LogSubscriber};
/// The level up to which events are logged: `off`, or that of an event.
pub use tracing::level_filters::LevelFilter as LogLevel;
