//! Writes the log events that `WHOLEMEM_LOG` selects to stderr.

use anyhow::Result;
use wholemem_os::log::{LogFilter, LogLevel, LogRecord, LogSubscriber};

use crate::terminal::{self, Colour, TextStyle};

/// Writes log events to stderr from now on, if the environment selects any. Without the variable nothing is installed.
///
/// # Errors
/// If `WHOLEMEM_LOG` is invalid.
pub fn start() -> Result<()> {
    if let Some(filter) = LogFilter::from_env()? {
        let colour = Colour::of_stderr();
        // The subscriber of a caller of this library stays, if it has one.
        LogSubscriber::new(filter, move |record| terminal::print_stderr(&line(&record, colour))).install();
    }
    Ok(())
}

fn line(record: &LogRecord, colour: Colour) -> String {
    let style = match LogLevel::from_level(record.level) {
        LogLevel::ERROR | LogLevel::WARN => TextStyle::Error,
        _ => TextStyle::Dim,
    };
    let level = format!("{}:", record.level.as_str().to_ascii_lowercase());
    format!("{} {}: {}\n", colour.paint(style, &level), record.target, record.message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_one_line_with_its_level_and_target() {
        let (target, message) = ("wholemem::collective", "made it rank=3".to_owned());
        let level = LogLevel::DEBUG.into_level().unwrap();
        let record = LogRecord { level, target, message };
        assert_eq!(line(&record, Colour::Off), "debug: wholemem::collective: made it rank=3\n");
    }
}
