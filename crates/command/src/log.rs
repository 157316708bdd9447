//! Writes log events to stderr: as text, as lines for journald, or as JSON lines.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use serde_json::{Value, json};
use wholemem_os::log::{LogFilter, LogLevel, LogRecord, LogSubscriber};

use crate::terminal::{self, Colour, TextStyle};

/// The environment variable with the format of log lines: `text`, `journal` or `json`.
pub const FORMAT_VARIABLE: &str = "WHOLEMEM_LOG_FORMAT";

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Level, target, message and fields.
    Text,
    /// As text, behind the time in UTC.
    TimedText,
    /// As text, behind the priority in the form that journald and the kernel use, such as `<4>`.
    Journal,
    /// One JSON object in each line.
    Json,
}

/// The error of a name that is not a format of log lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownFormat(String);

impl std::error::Error for UnknownFormat {}

impl fmt::Display for UnknownFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{FORMAT_VARIABLE}` is `{}`: the formats are text, journal and json", self.0)
    }
}

impl FromStr for LogFormat {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        match name {
            "text" => Ok(Self::Text),
            "journal" => Ok(Self::Journal),
            "json" => Ok(Self::Json),
            other => Err(UnknownFormat(other.to_owned())),
        }
    }
}

/// Writes the log events that `WHOLEMEM_LOG` selects to stderr from now on. Without the variable nothing is written, or, for a
/// `daemon`, the events from the level `info` on.
///
/// # Errors
/// If `WHOLEMEM_LOG` or `WHOLEMEM_LOG_FORMAT` is invalid.
pub fn start(daemon: bool) -> Result<()> {
    let default = || if daemon { "info".parse().map(Some) } else { Ok(None) };
    let Some(filter) = LogFilter::from_env()?.map_or_else(default, |filter| Ok(Some(filter)))? else {
        return Ok(());
    };
    let format = format(daemon)?;
    let colour = Colour::of_stderr();
    // The subscriber of a caller of this library stays, if it has one.
    LogSubscriber::new(filter, move |record| {
        terminal::print_stderr(&line(&record, format, colour, SystemTime::now()));
    })
    .install();
    Ok(())
}

fn format(daemon: bool) -> Result<LogFormat> {
    let set = std::env::var(FORMAT_VARIABLE).ok().filter(|name| !name.is_empty());
    let format = set.map(|name| name.parse::<LogFormat>()).transpose()?;
    Ok(match format {
        None if is_journal() => LogFormat::Journal,
        // Lines of a daemon are read later, and those of other commands while they run.
        None | Some(LogFormat::Text) if daemon => LogFormat::TimedText,
        format => format.unwrap_or(LogFormat::Text),
    })
}

/// Returns true if stderr is connected to journald, which then has set `JOURNAL_STREAM` to the device and inode of stderr.
fn is_journal() -> bool {
    let stream = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    let stderr = std::fs::metadata("/proc/self/fd/2").ok();
    stderr.is_some_and(|file| stream == format!("{}:{}", file.dev(), file.ino()))
}

fn line(record: &LogRecord, format: LogFormat, colour: Colour, now: SystemTime) -> String {
    let name = record.level.as_str().to_ascii_lowercase();
    let (target, message) = (record.target, &record.message);
    let text = |colour: Colour| {
        let style = match LogLevel::from_level(record.level) {
            LogLevel::ERROR | LogLevel::WARN => TextStyle::Error,
            _ => TextStyle::Dim,
        };
        format!("{} {target}: {message}\n", colour.paint(style, &format!("{name}:")))
    };
    match format {
        LogFormat::Text => text(colour),
        LogFormat::TimedText => format!("{} {}", utc(now), text(colour)),
        LogFormat::Journal => {
            // The priorities of syslog: error, warning, informational, debug.
            let priority = match LogLevel::from_level(record.level) {
                LogLevel::ERROR => 3,
                LogLevel::WARN => 4,
                LogLevel::INFO => 6,
                _ => 7,
            };
            format!("<{priority}>{target}: {message}\n")
        }
        LogFormat::Json => {
            let fields: serde_json::Map<_, _> =
                record.fields.iter().map(|(name, value)| ((*name).to_owned(), value_of(value))).collect();
            let (time, pid, text) = (utc(now), std::process::id(), &record.text);
            let line = json!({
                "time": time, "level": name, "target": target, "message": text, "pid": pid, "fields": fields,
            });
            format!("{line}\n")
        }
    }
}

/// Returns a field's value as JSON: a number or a truth value if its text is one, else the text without quotes.
fn value_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

/// Formats a time as in RFC 3339, in UTC with milliseconds.
fn utc(time: SystemTime) -> String {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let (seconds, millis) = (since.as_secs(), since.subsec_millis());
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // The days are counted from 0000-03-01, so that a leap day is the last of its year (Howard Hinnant, `civil_from_days`).
    let from_march = days + 719_468;
    let (era, of_era) = (from_march / 146_097, from_march % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> LogRecord {
        LogRecord {
            level: LogLevel::WARN.into_level().unwrap(),
            target: "wholemem_store::keeper",
            message: "the server has died pid=7 cause=\"signal\"".to_owned(),
            text: "the server has died".to_owned(),
            fields: vec![
                ("pid", "7".to_owned()),
                ("cause", "\"signal\"".to_owned()),
                ("name", "a b".to_owned()),
            ],
        }
    }

    fn at(millis: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_millis(millis)
    }

    #[test]
    fn a_record_is_one_line_in_every_format() {
        let of = |format| line(&record(), format, Colour::Off, at(1_795_111_551_378));
        let text = "warn: wholemem_store::keeper: the server has died pid=7 cause=\"signal\"\n";
        assert_eq!(of(LogFormat::Text), text);
        assert_eq!(of(LogFormat::TimedText), format!("2026-11-19T18:05:51.378Z {text}"));
        assert_eq!(of(LogFormat::Journal), text.replace("warn: ", "<4>"));
        let json = of(LogFormat::Json);
        assert_eq!(json.matches('\n').count(), 1);
        let value: Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&value["message"], &value["level"]), (&json!("the server has died"), &json!("warn")));
        assert_eq!(value["fields"], json!({ "pid": 7, "cause": "signal", "name": "a b" }));
        assert_eq!(value["time"], "2026-11-19T18:05:51.378Z");
    }

    #[test]
    fn times_are_those_of_the_gregorian_calendar() {
        for (millis, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399_999, "2000-02-28T23:59:59.999Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
            (1_735_689_599_000, "2024-12-31T23:59:59.000Z"),
        ] {
            assert_eq!(utc(at(millis)), text);
        }
    }

    #[test]
    fn an_unknown_format_is_an_error() {
        let error = "xml".parse::<LogFormat>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "`WHOLEMEM_LOG_FORMAT` is `xml`: the formats are text, journal and json"
        );
    }
}
