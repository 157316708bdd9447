//! `wholemem top`: a live view of the memory, the objects and the requests of a store.
//!
//! | module | contents |
//! |---|---|
//! | [`model`] | what is shown, computed from two samples of a store |
//! | [`render`](mod@render) | draws the view on a screen, or prints it as text |
//!
//! The view is drawn on the alternate screen of the terminal, which is restored at the end and after SIGTERM. If stdout is not a
//! terminal, the state is printed once.

mod model;
mod render;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use wholemem_command::terminal;
use wholemem_os::pidfd::Signal;
use wholemem_os::signal::Signals;
use wholemem_store::Client;

use self::model::{Sample, TopView};
use crate::cli::TopArgs;
use crate::store;

/// The longest time for which a signal or a resized terminal is not noticed.
const POLL: Duration = Duration::from_millis(200);

pub(crate) fn run(args: &TopArgs) -> Result<()> {
    let client = store::connect(&args.socket)?;
    let socket = wholemem_store::socket(args.socket.socket.as_deref())?.display().to_string();
    let interval = Duration::from_secs_f64(args.interval);
    if !(args.once || args.json) && std::io::stdout().is_terminal() {
        return show(&client, &socket, interval);
    }
    let first = Sample::take(&client)?;
    std::thread::sleep(interval);
    let view = TopView::new(&socket, Some(&first), &Sample::take(&client)?);
    if args.json { terminal::print_json(&view) } else { terminal::print(&render::text(&view)) }
}

/// Shows the view on the terminal until the user ends it.
fn show(client: &Client, socket: &str, interval: Duration) -> Result<()> {
    // Without this, SIGTERM would leave the terminal in raw mode. Ctrl-C is a key in raw mode.
    let signals = Signals::block(&[Signal::TERM, Signal::HUP, Signal::INT])?;
    let mut screen = ratatui::try_init().context("cannot use the terminal")?;
    let outcome = update(client, socket, interval, &signals, &mut screen);
    ratatui::restore();
    outcome
}

fn update(
    client: &Client,
    socket: &str,
    interval: Duration,
    signals: &Signals,
    screen: &mut ratatui::DefaultTerminal,
) -> Result<()> {
    let mut current = Sample::take(client)?;
    let mut view = TopView::new(socket, None, &current);
    let mut first_row = 0;
    loop {
        screen.draw(|frame| render::draw(frame, &view, first_row))?;
        let due = current.at + interval;
        while Instant::now() < due {
            if signals.next()?.is_some() {
                return Ok(());
            }
            if !event::poll(due.saturating_duration_since(Instant::now()).min(POLL))? {
                continue;
            }
            match action(&event::read()?) {
                Action::Quit => return Ok(()),
                Action::Scroll(rows) => first_row = scrolled(first_row, rows, view.objects.len()),
                Action::None => {}
            }
            screen.draw(|frame| render::draw(frame, &view, first_row))?;
        }
        let next = Sample::take(client)?;
        view = TopView::new(socket, Some(&current), &next);
        current = next;
        first_row = scrolled(first_row, 0, view.objects.len());
    }
}

/// What a key does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Quit,
    Scroll(isize),
    None,
}

fn action(event: &Event) -> Action {
    let Event::Key(key) = event else { return Action::None };
    let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        _ if key.kind == KeyEventKind::Release => Action::None,
        KeyCode::Char('c' | 'd') if is_control => Action::Quit,
        KeyCode::Char('q') | KeyCode::Esc => Action::Quit,
        KeyCode::Down | KeyCode::Char('j') => Action::Scroll(1),
        KeyCode::Up | KeyCode::Char('k') => Action::Scroll(-1),
        KeyCode::PageDown | KeyCode::Char(' ') => Action::Scroll(10),
        KeyCode::PageUp => Action::Scroll(-10),
        _ => Action::None,
    }
}

/// Returns the first row that is shown after the user has scrolled.
fn scrolled(first: usize, rows: isize, count: usize) -> usize {
    first.saturating_add_signed(rows).min(count.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use ratatui::crossterm::event::KeyEvent;

    use super::*;

    #[test]
    fn keys_end_the_view_or_scroll() {
        let key = |code, modifiers| action(&Event::Key(KeyEvent::new(code, modifiers)));
        let (plain, control) = (KeyModifiers::NONE, KeyModifiers::CONTROL);
        for (code, modifiers) in
            [(KeyCode::Char('q'), plain), (KeyCode::Esc, plain), (KeyCode::Char('c'), control)]
        {
            assert_eq!(key(code, modifiers), Action::Quit);
        }
        assert_eq!(key(KeyCode::Char('c'), plain), Action::None);
        assert_eq!(
            (key(KeyCode::Down, plain), key(KeyCode::PageUp, plain)),
            (Action::Scroll(1), Action::Scroll(-10))
        );
        assert_eq!(action(&Event::Resize(80, 24)), Action::None);
    }

    #[test]
    fn scrolling_stays_within_the_rows() {
        assert_eq!(
            [scrolled(0, -1, 5), scrolled(3, 10, 5), scrolled(4, 0, 2), scrolled(0, 1, 0)],
            [0, 4, 1, 0]
        );
    }
}
