//! The filter of log events: the level up to which the events of each target are logged.

use std::str::FromStr;

use super::LogLevel;

/// The name of the environment variable with the filter of log events.
pub const LOG_VARIABLE: &str = "WHOLEMEM_LOG";

/// The variable of NCCL that is read if [`LOG_VARIABLE`] is not set.
const NCCL_VARIABLE: &str = "NCCL_DEBUG";

/// The prefix of all targets of wholemem's events. A target is the path of a module, such as `wholemem_hal::cuda`.
const ROOT: &str = "wholemem";

const LEVELS: [(&str, LogLevel); 6] = [
    ("off", LogLevel::OFF),
    ("error", LogLevel::ERROR),
    ("warn", LogLevel::WARN),
    ("info", LogLevel::INFO),
    ("debug", LogLevel::DEBUG),
    ("trace", LogLevel::TRACE),
];

/// A filter of log events: directives `LEVEL` and `TARGET=LEVEL`, separated by commas.
///
/// A directive with a target applies to all targets that begin with it. The longest such target decides; if none
/// applies, the directive without a target does, and without that directive nothing is logged. A target without a level
/// stands for all of its events. `.` may be written for `::`, as in the names of Python's loggers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFilter {
    /// The level of targets to which no directive applies.
    default: LogLevel,
    /// The targets with a level, longest first.
    targets: Vec<(String, LogLevel)>,
}

/// A directive of a log filter is neither a level nor a target of wholemem, with or without a level.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{directive}` is neither a level (off, error, warn, info, debug, trace) nor a target of wholemem, with or without a level, \
     such as `wholemem::collective=debug` or `wholemem::collective`"
)]
pub struct BadLogFilter {
    /// The invalid directive.
    pub directive: String,
}

/// The environment variable with the filter of log events has an invalid value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the environment variable `{LOG_VARIABLE}` has the invalid value `{value}`: {reason}")]
pub struct BadLogVariable {
    /// The value of the variable.
    pub value: String,
    /// The invalid directive of the filter.
    pub reason: BadLogFilter,
}

impl LogFilter {
    /// Returns the filter that the environment sets: `WHOLEMEM_LOG`, or, if that is not set, `NCCL_DEBUG` (`WARN`,
    /// `INFO`, which selects `debug`, and `TRACE` and `ABORT`, which select `trace`). Returns `None` if neither is set.
    ///
    /// # Errors
    /// [`BadLogVariable`] for an invalid `WHOLEMEM_LOG`. Other values of NCCL's variable are ignored.
    pub fn from_env() -> Result<Option<Self>, BadLogVariable> {
        Self::read(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn read(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, BadLogVariable> {
        let set = |name| get(name).filter(|value| !value.trim().is_empty());
        if let Some(value) = set(LOG_VARIABLE) {
            let filter = value.parse();
            return filter.map(Some).map_err(|reason| BadLogVariable { value, reason });
        }
        let level = match set(NCCL_VARIABLE).unwrap_or_default().to_ascii_uppercase().as_str() {
            "WARN" => LogLevel::WARN,
            "INFO" => LogLevel::DEBUG,
            "ABORT" | "TRACE" => LogLevel::TRACE,
            _ => return Ok(None),
        };
        Ok(Some(Self { default: level, targets: Vec::new() }))
    }

    /// Returns the level up to which the events of a target are logged.
    #[must_use]
    pub fn level_of(&self, target: &str) -> LogLevel {
        let found = self.targets.iter().find(|(prefix, _)| target.starts_with(prefix.as_str()));
        found.map_or(self.default, |(_, level)| *level)
    }

    /// Returns the most verbose level that any target has.
    #[must_use]
    pub fn max_level(&self) -> LogLevel {
        self.targets.iter().map(|(_, level)| *level).chain([self.default]).max().unwrap_or(LogLevel::OFF)
    }
}

impl FromStr for LogFilter {
    type Err = BadLogFilter;

    fn from_str(text: &str) -> Result<Self, BadLogFilter> {
        let mut filter = Self { default: LogLevel::OFF, targets: Vec::new() };
        for directive in text.split(',').map(str::trim).filter(|directive| !directive.is_empty()) {
            let bad = || BadLogFilter { directive: directive.to_owned() };
            let (target, level) = match directive.split_once('=') {
                Some((target, level)) => (target, level_named(level).ok_or_else(bad)?),
                None => match level_named(directive) {
                    Some(level) => {
                        filter.default = level;
                        continue;
                    }
                    None => (directive, LogLevel::TRACE),
                },
            };
            let target = target.trim().replace('.', "::");
            if !target.starts_with(ROOT) {
                return Err(bad());
            }
            filter.targets.retain(|(other, _)| *other != target);
            filter.targets.push((target, level));
        }
        filter.targets.sort_by_key(|(target, _)| std::cmp::Reverse(target.len()));
        Ok(filter)
    }
}

fn level_named(name: &str) -> Option<LogLevel> {
    let name = name.trim();
    LEVELS.into_iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, level)| level)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(text: &str) -> LogFilter {
        text.parse().unwrap()
    }

    #[test]
    fn the_directive_with_the_longest_matching_target_decides() {
        let filter = filter("wholemem=info, wholemem::collective=TRACE,error,wholemem.store.server=off,");
        assert_eq!(filter.level_of("wholemem::collective"), LogLevel::TRACE);
        assert_eq!(filter.level_of("wholemem::communicator"), LogLevel::INFO);
        assert_eq!(filter.level_of("wholemem_hal::cuda"), LogLevel::INFO);
        assert_eq!(filter.level_of("wholemem::store::server::io"), LogLevel::OFF);
        assert_eq!(filter.level_of("other"), LogLevel::ERROR);
        assert_eq!(filter.max_level(), LogLevel::TRACE);
    }

    #[test]
    fn a_target_without_a_level_selects_all_of_its_events_and_no_others() {
        let filter = filter("wholemem_comm");
        assert_eq!(filter.level_of("wholemem_comm::progress"), LogLevel::TRACE);
        assert_eq!(filter.level_of("wholemem::collective"), LogLevel::OFF);
    }

    #[test]
    fn the_last_directive_for_a_target_applies() {
        assert_eq!(filter("wholemem=info,wholemem=warn,error,debug"), filter("wholemem=warn,debug"));
    }

    #[test]
    fn a_filter_without_directives_logs_nothing() {
        assert_eq!(filter(" , ").max_level(), LogLevel::OFF);
    }

    #[test]
    fn a_directive_that_is_neither_a_level_nor_a_target_is_rejected() {
        for directive in ["verbose", "wholemem=loud", "wholemem=", "=debug", "torch=debug", "5", "wholemem=1"]
        {
            let expected = BadLogFilter { directive: directive.to_owned() };
            assert_eq!(format!("warn,{directive}").parse::<LogFilter>(), Err(expected), "{directive}");
        }
    }

    #[test]
    fn our_variable_takes_precedence_over_that_of_nccl() {
        let read = |ours: &str, nccl: &str| {
            let values = [(LOG_VARIABLE, ours.to_owned()), (NCCL_VARIABLE, nccl.to_owned())];
            LogFilter::read(|name| {
                values.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
            })
        };
        assert_eq!(read("warn", "INFO"), Ok(Some(filter("warn"))));
        assert_eq!(read(" ", "INFO"), Ok(Some(filter("debug"))));
        assert_eq!(read("", "warn"), Ok(Some(filter("warn"))));
        assert_eq!(read("", "TRACE"), Ok(Some(filter("trace"))));
        for ignored in ["", "VERSION", "NONE", "chatty"] {
            assert_eq!(read("", ignored), Ok(None), "{ignored}");
        }
        let reason = BadLogFilter { directive: "chatty".to_owned() };
        let error = BadLogVariable { value: "warn,chatty".to_owned(), reason };
        let text = "the environment variable `WHOLEMEM_LOG` has the invalid value `warn,chatty`: \
                    `chatty` is neither a level (off, error, warn, info, debug, trace) \
                    nor a target of wholemem, with or without a level, \
                    such as `wholemem::collective=debug` or `wholemem::collective`";
        assert_eq!(error.to_string(), text);
        assert_eq!(read("warn,chatty", "INFO"), Err(error));
    }
}
