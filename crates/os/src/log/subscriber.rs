//! A subscriber that filters events and passes each as text to a sink.

use std::fmt::{self, Write as _};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, Subscriber, set_global_default};
use tracing::{Event, Level, Metadata};

use super::LogFilter;
use crate::Visible;

/// A log event as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRecord {
    /// The level of the event.
    pub level: Level,
    /// The target of the event: the path of a module, such as `wholemem_hal::cuda`.
    pub target: &'static str,
    /// The message of the event, followed by its fields as `name=value`. Control characters are escaped, because a
    /// field may contain text of another user.
    pub message: String,
    /// The message of the event without its fields, and without escaped characters.
    pub text: String,
    /// The fields of the event, each with its value as text, without escaped characters.
    pub fields: Vec<(&'static str, String)>,
}

/// A subscriber that passes the events that a filter selects to a sink. Spans are ignored.
///
/// The thread that emits an event calls the sink, possibly while it holds locks: the sink must not wait for locks that
/// are held while events are emitted, such as an interpreter's.
#[derive(Debug)]
pub struct LogSubscriber<S> {
    filter: LogFilter,
    sink: S,
}

impl<S: Fn(LogRecord) + Send + Sync + 'static> LogSubscriber<S> {
    /// Creates a subscriber that passes the events that `filter` selects to `sink`.
    pub fn new(filter: LogFilter, sink: S) -> Self {
        Self { filter, sink }
    }

    /// Makes this the subscriber of all threads of the process. Returns false if the process has a subscriber already,
    /// which stays.
    pub fn install(self) -> bool {
        set_global_default(self).is_ok()
    }
}

impl<S: Fn(LogRecord) + Send + Sync + 'static> Subscriber for LogSubscriber<S> {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.enabled(metadata) { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // The question `tracing::enabled!` is neither an event nor a span.
        !metadata.is_span() && *metadata.level() <= self.filter.level_of(metadata.target())
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.filter.max_level())
    }

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let mut text = EventText::default();
        event.record(&mut text);
        let EventText { message: text, fields } = text;
        let shown: String = fields.iter().map(|(name, value)| format!(" {name}={value}")).collect();
        let message = Visible(&[text.as_str(), &shown].concat()).to_string();
        let (level, target) = (*metadata.level(), metadata.target());
        (self.sink)(LogRecord { level, target, message, text, fields });
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// The message of an event, and its other fields as text.
#[derive(Debug, Default)]
struct EventText {
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Formatting into a `String` fails only if the value's own implementation fails; the text so far is kept.
        let mut text = String::new();
        let _ = write!(text, "{value:?}");
        match field.name() {
            "message" => self.message = text,
            name => self.fields.push((name, text)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Runs `body` with a subscriber of this thread only, and returns the records.
    fn records_of(filter: &str, body: impl FnOnce()) -> Vec<LogRecord> {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&seen);
        let subscriber =
            LogSubscriber::new(filter.parse().unwrap(), move |record| sink.lock().unwrap().push(record));
        tracing::subscriber::with_default(subscriber, body);
        seen.lock().unwrap().clone()
    }

    #[test]
    fn an_event_becomes_its_message_and_its_fields() {
        let records = records_of("debug", || {
            tracing::debug!(target: "wholemem::a", rank = 3, name = "x\ny", size = %crate::Size(1 << 20), "made it");
        });
        let message = r#"made it rank=3 name="x\ny" size=1 MiB"#.to_owned();
        let fields = [("rank", "3"), ("name", r#""x\ny""#), ("size", "1 MiB")];
        let fields = fields.map(|(name, value)| (name, value.to_owned())).to_vec();
        let text = "made it".to_owned();
        assert_eq!(
            records,
            [LogRecord { level: Level::DEBUG, target: "wholemem::a", message, text, fields }]
        );
    }

    #[test]
    fn control_characters_of_a_displayed_field_are_escaped() {
        let records =
            records_of("debug", || tracing::warn!(target: "wholemem::a", name = %"a\u{1b}[2J", "bad"));
        assert_eq!(records[0].message, r"bad name=a\u{1b}[2J");
    }

    #[test]
    fn events_that_the_filter_excludes_are_not_passed_on() {
        let records = records_of("wholemem::b=info", || {
            tracing::error!(target: "wholemem::a", "another target");
            tracing::debug!(target: "wholemem::b", "too verbose");
            tracing::info!(target: "wholemem::b::c", "selected");
        });
        assert_eq!(records.iter().map(|record| &record.message[..]).collect::<Vec<_>>(), ["selected"]);
    }

    #[test]
    fn the_filter_answers_whether_a_level_is_enabled() {
        records_of("wholemem::b=info", || {
            assert!(tracing::enabled!(target: "wholemem::b", Level::INFO));
            assert!(!tracing::enabled!(target: "wholemem::b", Level::DEBUG));
            assert!(!tracing::enabled!(target: "wholemem::a", Level::ERROR));
        });
    }

    #[test]
    fn spans_are_ignored() {
        let records = records_of("trace", || {
            let span = tracing::error_span!(target: "wholemem::a", "span", value = 1);
            span.in_scope(|| tracing::error!(target: "wholemem::a", "inside"));
        });
        assert_eq!(records.iter().map(|record| &record.message[..]).collect::<Vec<_>>(), ["inside"]);
    }
}
