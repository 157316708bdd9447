//! The statistics of a store in the text format of Prometheus.

use std::fmt::Write;

use wholemem_store::{RequestStatistics, Statistics};

/// The values that a server reports by name, with the names and the meanings of their metrics. Names that end with `_total` are
/// counters, which begin at zero with each server.
const VALUES: [(&str, &str, &str); 10] = [
    ("objects_sealed", "objects_sealed_total", "Objects that were sealed."),
    ("bytes_sealed", "bytes_sealed_total", "Length of all objects that were sealed."),
    ("objects_deleted", "objects_deleted_total", "Objects that were deleted or replaced."),
    ("objects_freed", "objects_freed_total", "Deleted objects whose memory was freed."),
    ("events", "events_total", "Published, replaced and deleted names; a pack is one event."),
    ("clients_accepted", "clients_accepted_total", "Clients that connected."),
    ("clients_refused", "clients_refused_total", "Clients that were refused when they connected."),
    ("allocations", "allocations", "Pieces of memory that hold objects."),
    ("arena_bytes", "arena_bytes", "Memory that small objects share."),
    ("preallocated_bytes", "preallocated_bytes", "Memory that is allocated before it is requested."),
];

/// Returns the statistics of a store as the text that Prometheus reads.
pub(super) fn render(statistics: &Statistics) -> String {
    let status = &statistics.status;
    let mut text = Exposition::default();
    text.metric("objects", "Sealed objects.", &[("", status.objects)]);
    text.metric("drafts", "Objects that clients are writing.", &[("", status.unsealed)]);
    text.metric("retired_objects", "Deleted objects that clients still hold.", &[("", status.retired)]);
    text.metric("clients", "Connected clients.", &[("", status.clients)]);
    let kinds = [("host", status.host), ("device", status.device)];
    let used = kinds.map(|(kind, usage)| (format!("{{kind=\"{kind}\"}}"), usage.used));
    text.metric("memory_used_bytes", "Memory of objects and arenas.", &used);
    let quota = kinds.map(|(kind, usage)| (format!("{{kind=\"{kind}\"}}"), usage.quota));
    text.metric("memory_quota_bytes", "Limit of the memory of objects and arenas.", &quota);
    let restarts = status.epoch.saturating_sub(1);
    text.metric("server_restarts_total", "Servers that were started after the first.", &[("", restarts)]);
    let started = format!("{}.{:03}", statistics.started / 1000, statistics.started % 1000);
    text.head("server_start_time_seconds", "Start of the server since the Unix epoch.", "gauge");
    text.line("server_start_time_seconds", "", &started);
    for (value, name, help) in VALUES {
        if let Some(value) = statistics.value(value) {
            text.metric(name, help, &[("", value)]);
        }
    }
    text.requests(&statistics.requests);
    text.0
}

#[derive(Debug, Default)]
struct Exposition(String);

impl Exposition {
    fn head(&mut self, name: &str, help: &str, kind: &str) {
        let _ = write!(self.0, "# HELP wholemem_store_{name} {help}\n# TYPE wholemem_store_{name} {kind}\n");
    }

    fn line(&mut self, name: &str, labels: &str, value: &str) {
        let _ = writeln!(self.0, "wholemem_store_{name}{labels} {value}");
    }

    /// Writes a metric with one line for each set of labels.
    fn metric(&mut self, name: &str, help: &str, values: &[(impl AsRef<str>, u64)]) {
        self.head(name, help, if name.ends_with("_total") { "counter" } else { "gauge" });
        for (labels, value) in values {
            self.line(name, labels.as_ref(), &value.to_string());
        }
    }

    fn requests(&mut self, all: &[RequestStatistics]) {
        let refused: Vec<_> = all
            .iter()
            .map(|requests| (format!("{{kind=\"{}\"}}", requests.kind), requests.refused))
            .collect();
        self.metric("requests_refused_total", "Requests that were refused, by kind.", &refused);
        let name = "request_duration_seconds";
        self.head(name, "Time from a request's receipt to its answer, by kind.", "histogram");
        for requests in all {
            let kind = &requests.kind;
            let mut below = 0;
            for (bucket, count) in requests.buckets.iter().enumerate() {
                below += count;
                let bound = RequestStatistics::bound(bucket);
                let bound = bound.map_or_else(|| "+Inf".to_owned(), |bound| bound.as_secs_f64().to_string());
                let labels = format!("{{kind=\"{kind}\",le=\"{bound}\"}}");
                self.line(&format!("{name}_bucket"), &labels, &below.to_string());
            }
            let labels = format!("{{kind=\"{kind}\"}}");
            let seconds = requests.nanoseconds as f64 / 1e9;
            self.line(&format!("{name}_sum"), &labels, &seconds.to_string());
            self.line(&format!("{name}_count"), &labels, &requests.count.to_string());
        }
    }
}
