//! Draws the view of `wholemem top`.

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Gauge, Paragraph, Row, Table};
use wholemem_command::size::RoundedSize;
use wholemem_command::table::{Align, TextTable};
use wholemem_command::terminal::{self, Colour, TextStyle};
use wholemem_os::width::to_usize;
use wholemem_store::Usage;

use super::model::{RequestRate, TopView};
use crate::store::summary::{ObjectSummary, rounded_time};

/// The maximum number of kinds of requests that are shown.
const MAX_KINDS: usize = 6;

fn size(bytes: u64) -> String {
    RoundedSize(to_usize(bytes)).to_string()
}

/// Formats a rate with two or three digits; zero as `-`.
fn rate(per_second: f64) -> String {
    match per_second {
        0.0 => "-".to_owned(),
        rate if rate < 10.0 => format!("{rate:.1}"),
        rate => format!("{rate:.0}"),
    }
}

/// Formats a time in microseconds in us, ms or s.
fn time(micros: Option<f64>) -> String {
    match micros {
        None => "-".to_owned(),
        Some(micros) if micros < 1e3 => format!("{micros:.0} us"),
        Some(micros) if micros < 1e6 => format!("{:.1} ms", micros / 1e3),
        Some(micros) => format!("{:.1} s", micros / 1e6),
    }
}

fn title(view: &TopView) -> String {
    let up = rounded_time(Duration::from_secs(view.uptime_seconds));
    format!(
        "wholemem top  {}  server {}, number {}, up {up}",
        terminal::escaped(&view.socket),
        view.pid,
        view.status.epoch
    )
}

fn summary(view: &TopView) -> [String; 2] {
    let status = &view.status;
    let bytes = RoundedSize(rounded(view.sealed_bytes_per_second));
    [
        format!(
            "objects {}  drafts {}  retired {}  clients {}  events/s {}  sealed {bytes}/s",
            status.objects,
            status.unsealed,
            status.retired,
            status.clients,
            rate(view.events_per_second)
        ),
        format!("arenas {}, prepared {}", size(view.arena_bytes), size(view.preallocated_bytes)),
    ]
}

/// Rounds a rate of bytes down; a negative or infinite one is zero or the maximum.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the conversion saturates")]
fn rounded(bytes: f64) -> usize {
    bytes as usize
}

fn usage(usage: Usage) -> String {
    format!("{} of {}", size(usage.used), size(usage.quota))
}

const REQUEST_COLUMNS: [&str; 6] = ["request", "per second", "refused/s", "mean", "99%", "total"];

fn request_cells(request: &RequestRate) -> [String; 6] {
    [
        request.kind.clone(),
        rate(request.per_second),
        rate(request.refused_per_second),
        time(request.mean_us),
        time(request.p99_us),
        request.total.to_string(),
    ]
}

const OBJECT_COLUMNS: [&str; 6] = ["size", "version", "age", "readers", "content", "name"];

fn object_cells(object: &ObjectSummary) -> [String; 6] {
    [
        RoundedSize(object.len).to_string(),
        object.version.to_string(),
        object.age(),
        object.readers.map(|readers| readers.to_string()).unwrap_or_default(),
        object.content(),
        terminal::escaped(&object.name),
    ]
}

/// Returns the view as text.
pub(super) fn text(view: &TopView) -> String {
    let [counts, memory] = summary(view);
    let (host, device) = (usage(view.status.host), usage(view.status.device));
    let mut requests = TextTable::new(
        REQUEST_COLUMNS.map(|name| (name, if name == "request" { Align::Left } else { Align::Right })),
    );
    view.requests.iter().for_each(|request| requests.row(TextStyle::Plain, request_cells(request)));
    let is_text = |name| matches!(name, "content" | "name");
    let mut objects = TextTable::new(
        OBJECT_COLUMNS.map(|name| (name, if is_text(name) { Align::Left } else { Align::Right })),
    );
    view.objects.iter().for_each(|object| objects.row(TextStyle::Plain, object_cells(object)));
    let colour = Colour::of_stdout();
    let title = terminal::fitted(&title(view));
    format!(
        "{title}\n\n  {counts}\n  host {host}, device {device}; {memory}\n\n{}\n{}",
        requests.render(colour),
        objects.render(colour)
    )
}

/// Draws the view. The objects are shown from `first_row` on.
pub(super) fn draw(frame: &mut Frame<'_>, view: &TopView, first_row: usize) {
    let has_device = view.status.device.quota > 0;
    let kinds = view.requests.len().min(MAX_KINDS);
    let rows = [
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(u16::from(has_device)),
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(u16::try_from(kinds + 1).unwrap_or(u16::MAX)),
        Constraint::Length(1),
        Constraint::Min(1),
        Constraint::Length(1),
    ];
    let [head, counts, host, device, memory, _, requests, _, objects, foot] =
        Layout::vertical(rows).areas(frame.area());
    let [counts_text, memory_text] = summary(view);
    frame.render_widget(Line::styled(title(view), heading()), head);
    frame.render_widget(Paragraph::new(counts_text), counts);
    draw_gauge(frame, host, "host  ", view.status.host);
    if has_device {
        draw_gauge(frame, device, "device", view.status.device);
    }
    frame.render_widget(Paragraph::new(memory_text), memory);
    draw_requests(frame, requests, &view.requests[..kinds]);
    draw_objects(frame, objects, view, first_row);
    let keys = format!(
        "q quit   Up, Down scroll   row {} of {}",
        (first_row + 1).min(view.objects.len()),
        view.objects.len()
    );
    frame.render_widget(Line::styled(keys, Style::new().add_modifier(Modifier::DIM)), foot);
}

fn heading() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn draw_gauge(frame: &mut Frame<'_>, area: Rect, name: &str, memory: Usage) {
    let [label, bar] = Layout::horizontal([Constraint::Length(8), Constraint::Min(1)]).areas(area);
    frame.render_widget(Paragraph::new(name), label);
    let ratio = if memory.quota == 0 { 0.0 } else { (memory.used as f64 / memory.quota as f64).min(1.0) };
    frame.render_widget(Gauge::default().ratio(ratio).label(usage(memory)), bar);
}

fn draw_requests(frame: &mut Frame<'_>, area: Rect, requests: &[RequestRate]) {
    let widths = [14, 12, 11, 11, 11, 12].map(Constraint::Length);
    let cells = |cells: [String; 6]| {
        cells.into_iter().enumerate().map(|(at, cell)| match at {
            0 => Cell::from(cell),
            _ => Cell::from(Line::from(cell).right_aligned()),
        })
    };
    let rows = requests.iter().map(|request| Row::new(cells(request_cells(request))));
    let head = Row::new(cells(REQUEST_COLUMNS.map(str::to_owned))).style(heading());
    frame.render_widget(Table::new(rows, widths).header(head), area);
}

fn draw_objects(frame: &mut Frame<'_>, area: Rect, view: &TopView, first_row: usize) {
    let shown = || view.objects.iter().skip(first_row).take(usize::from(area.height)).map(object_cells);
    let content = shown().map(|cells| cells[4].chars().count()).chain([7]).max().unwrap_or(7);
    let content = u16::try_from(content.min(24)).unwrap_or(24);
    // The widths of the other columns, and the gaps between all.
    let left = area.width.saturating_sub(10 + 7 + 6 + 7 + content + 1 + 5 + 1);
    let widths = [10, 7, 6, 7].map(Constraint::Length).into_iter();
    let widths = widths.chain([Constraint::Length(content + 1), Constraint::Min(8)]);
    let cells = |cells: [String; 6]| {
        cells.into_iter().enumerate().map(|(at, cell)| match at {
            4 | 5 => Cell::from(format!(" {cell}")),
            _ => Cell::from(Line::from(cell).right_aligned()),
        })
    };
    let rows = shown().map(|mut row| {
        row[5] = shortened(&row[5], usize::from(left));
        Row::new(cells(row))
    });
    let head = Row::new(cells(OBJECT_COLUMNS.map(str::to_owned))).style(heading());
    frame.render_widget(Table::new(rows, widths).header(head), area);
}

/// Shortens a name to a number of characters in its middle, because the ends of names tell most.
fn shortened(name: &str, width: usize) -> String {
    let count = name.chars().count();
    if count <= width || width < 5 {
        return name.to_owned();
    }
    let tail = (width - 1) / 2;
    let head: String = name.chars().take(width - 1 - tail).collect();
    head + "…" + &name.chars().skip(count - tail).collect::<String>()
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use wholemem_store::Status;

    use super::*;

    fn object(number: usize) -> ObjectSummary {
        ObjectSummary {
            name: format!("model/layers.{number}.self_attn.q_proj.weight"),
            id: 1,
            len: (40 - number) << 20,
            version: 3,
            owner: 0,
            owner_name: "root".to_owned(),
            // A clock that was set back shows an age of zero.
            created_ms: u64::MAX / 2,
            place: "host",
            readers: Some(4),
            type_name: Some("bf16".to_owned()),
            shape: Some(vec![4096, 4096]),
            objects: None,
            pack: None,
            description: String::new(),
        }
    }

    fn view() -> TopView {
        let mut status = Status::default();
        (status.objects, status.unsealed, status.retired, status.clients) = (29, 1, 2, 5);
        (status.host.used, status.host.quota, status.epoch) = (12 << 30, 48 << 30, 2);
        let request = |kind: &str, per_second, total| RequestRate {
            kind: kind.to_owned(),
            total,
            per_second,
            refused_per_second: 0.0,
            mean_us: Some(35.4),
            p99_us: Some(64.0),
        };
        TopView {
            socket: "/run/user/1000/wholemem.sock".to_owned(),
            pid: 4242,
            uptime_seconds: 7300,
            status,
            arena_bytes: 32 << 20,
            preallocated_bytes: 1 << 30,
            sealed_bytes_per_second: 1.5e9,
            events_per_second: 1.5,
            requests: vec![request("create", 12_345.0, 9_999_999), request("seal", 0.0, 7)],
            objects: (0..30).map(object).collect(),
        }
    }

    fn screen(width: u16, height: u16, view: &TopView, first_row: usize) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, view, first_row)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line =
            |row: u16| (0..width).map(|column| buffer[(column, row)].symbol().to_owned()).collect::<String>();
        (0..height).map(|row| line(row).trim_end().to_owned() + "\n").collect()
    }

    #[test]
    fn the_view_fits_80_columns_and_24_rows() {
        insta::assert_snapshot!(screen(80, 24, &view(), 0), @r"
        wholemem top  /run/user/1000/wholemem.sock  server 4242, number 2, up 2 h
        objects 29  drafts 1  retired 2  clients 5  events/s 1.5  sealed 1.4 GiB/s
        host    ██████████████████          12 GiB of 48 GiB
        arenas 32 MiB, prepared 1 GiB

        request          per second   refused/s        mean         99%        total
        create                12345           -       35 us       64 us      9999999
        seal                      -           -       35 us       64 us            7

              size version    age readers  content          name
            40 MiB       3    0 s       4  bf16[4096,4096]  model/layers.0…q_proj.weight
            39 MiB       3    0 s       4  bf16[4096,4096]  model/layers.1…q_proj.weight
            38 MiB       3    0 s       4  bf16[4096,4096]  model/layers.2…q_proj.weight
            37 MiB       3    0 s       4  bf16[4096,4096]  model/layers.3…q_proj.weight
            36 MiB       3    0 s       4  bf16[4096,4096]  model/layers.4…q_proj.weight
            35 MiB       3    0 s       4  bf16[4096,4096]  model/layers.5…q_proj.weight
            34 MiB       3    0 s       4  bf16[4096,4096]  model/layers.6…q_proj.weight
            33 MiB       3    0 s       4  bf16[4096,4096]  model/layers.7…q_proj.weight
            32 MiB       3    0 s       4  bf16[4096,4096]  model/layers.8…q_proj.weight
            31 MiB       3    0 s       4  bf16[4096,4096]  model/layers.9…q_proj.weight
            30 MiB       3    0 s       4  bf16[4096,4096]  model/layers.1…q_proj.weight
            29 MiB       3    0 s       4  bf16[4096,4096]  model/layers.1…q_proj.weight
            28 MiB       3    0 s       4  bf16[4096,4096]  model/layers.1…q_proj.weight
        q quit   Up, Down scroll   row 1 of 30
        ");
    }

    #[test]
    fn scrolled_rows_and_device_memory_are_shown() {
        let mut view = view();
        (view.status.device.used, view.status.device.quota) = (1 << 30, 4 << 30);
        let screen = screen(80, 24, &view, 28);
        assert!(screen.contains("device  ") && screen.contains("1 GiB of 4 GiB"), "{screen}");
        assert!(screen.contains("   12 MiB") && !screen.contains("   13 MiB"), "{screen}");
        assert!(screen.ends_with("row 29 of 30\n"), "{screen}");
    }

    #[test]
    fn a_small_terminal_is_no_error() {
        for (width, height) in [(1, 1), (20, 5), (300, 80)] {
            screen(width, height, &view(), 29);
        }
    }
}
