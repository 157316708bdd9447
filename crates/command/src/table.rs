//! Text tables on stdout: aligned columns with headings and without borders, which fit the width of the terminal.
//!
//! A table that is too wide loses the text columns whose cells are all equal: they are printed once, above it. If it still is,
//! the widest text column is wrapped. Output that is not a terminal is not limited, so that each row stays one line.

use comfy_table::{CellAlignment, presets};
use unicode_width::UnicodeWidthStr;

use crate::terminal::{self, Colour, TextStyle};
use crate::wrap::wrap;

/// The spaces before the first column.
const INDENT: usize = 2;

/// The spaces between two columns.
const GAP: usize = 2;

/// The smallest width to which a column is wrapped.
const MIN_WRAPPED: usize = 16;

/// The alignment of a column in a text table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// The column is left-aligned, and contains text that may be wrapped.
    Left,
    /// The column is right-aligned, and contains numbers.
    Right,
}

/// A text table in which each row has a style, such as a colour.
#[derive(Debug)]
pub struct TextTable {
    columns: Vec<(String, Align)>,
    rows: Vec<(TextStyle, Vec<String>)>,
}

impl TextTable {
    /// Creates a text table with the given columns and no rows.
    pub fn new<const N: usize>(columns: [(&str, Align); N]) -> Self {
        let columns = columns.map(|(name, align)| (name.to_owned(), align)).to_vec();
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row to the table.
    pub fn row<const N: usize>(&mut self, style: TextStyle, cells: [String; N]) {
        // Line breaks are replaced, because they would split the row. Control characters are escaped, because cells may contain
        // names that other users chose.
        let cells = cells.map(|cell| terminal::escaped(&cell.replace('\n', " ")));
        self.rows.push((style, cells.to_vec()));
    }

    /// Returns the table as text, with each line indented by two spaces, for the width of the terminal.
    pub fn render(&self, colour: Colour) -> String {
        self.render_within(colour, terminal::width())
    }

    /// Returns the table as text of at most `width` columns. Number columns and the first column are never shortened.
    pub fn render_within(&self, colour: Colour, width: Option<usize>) -> String {
        let Some(width) = width.filter(|width| self.width() > *width) else { return self.lines(colour) };
        let (constant, mut narrow) = self.split_constant();
        narrow.wrap_within(width);
        let above = match constant.is_empty() {
            true => Vec::new(),
            false => wrap(&format!("all rows: {}", constant.join(", ")), width - INDENT),
        };
        let above: String = above.iter().map(|line| format!("  {line}\n")).collect();
        let gap = if above.is_empty() { "" } else { "\n" };
        format!("{above}{gap}{}", narrow.lines(colour))
    }

    fn widths(&self) -> Vec<usize> {
        let of_column = |at: usize| {
            let cells = self.rows.iter().map(|(_, cells)| cells[at].width());
            cells.chain([self.columns[at].0.width()]).max().unwrap_or(0)
        };
        (0..self.columns.len()).map(of_column).collect()
    }

    fn width(&self) -> usize {
        let widths = self.widths();
        INDENT + widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1)
    }

    /// Returns the text columns whose cells are all equal, and the table without them. The first column stays.
    fn split_constant(&self) -> (Vec<String>, Self) {
        let is_constant = |at: usize| {
            let first = self.rows.first().map(|(_, cells)| &cells[at]);
            at > 0
                && self.columns[at].1 == Align::Left
                && first.is_some_and(|first| {
                    first.width() < 3 * MIN_WRAPPED && self.rows.iter().all(|(_, cells)| &cells[at] == first)
                })
        };
        let (gone, kept): (Vec<_>, Vec<_>) = (0..self.columns.len()).partition(|at| is_constant(*at));
        let text = |at: &usize| format!("{} {}", self.columns[*at].0, self.rows[0].1[*at]);
        let constant = gone.iter().filter(|at| !self.rows[0].1[**at].is_empty()).map(text).collect();
        let columns = kept.iter().map(|at| self.columns[*at].clone()).collect();
        let cells = |cells: &Vec<String>| kept.iter().map(|at| cells[*at].clone()).collect();
        let rows = self.rows.iter().map(|(style, row)| (*style, cells(row))).collect();
        (constant, Self { columns, rows })
    }

    /// Wraps the widest text column, so that the table has at most `width` columns if possible.
    fn wrap_within(&mut self, width: usize) {
        let widths = self.widths();
        let Some(excess) = self.width().checked_sub(width).filter(|excess| *excess > 0) else { return };
        let texts = (0..widths.len()).filter(|at| self.columns[*at].1 == Align::Left);
        let Some(widest) = texts.max_by_key(|at| widths[*at]) else { return };
        let limit = widths[widest].saturating_sub(excess).max(MIN_WRAPPED);
        for (style, cells) in std::mem::take(&mut self.rows) {
            let lines = wrap(&cells[widest], limit);
            for (number, line) in lines.into_iter().enumerate() {
                let mut row = if number == 0 { cells.clone() } else { vec![String::new(); cells.len()] };
                row[widest] = line;
                self.rows.push((style, row));
            }
        }
    }

    fn lines(&self, colour: Colour) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::NOTHING).set_header(self.columns.iter().map(|(name, _)| name));
        for (column, (_, align)) in table.column_iter_mut().zip(&self.columns) {
            column.set_padding((0, 2));
            column.set_cell_alignment(match align {
                Align::Left => CellAlignment::Left,
                Align::Right => CellAlignment::Right,
            });
        }
        table.add_rows(self.rows.iter().map(|(_, cells)| cells));
        let styles = [TextStyle::Heading].into_iter().chain(self.rows.iter().map(|(style, _)| *style));
        let lines = table.lines().zip(styles);
        lines.map(|(line, style)| format!("  {}\n", colour.paint(style, line.trim_end()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> TextTable {
        let mut table = TextTable::new([("name", Align::Left), ("time", Align::Right), ("why", Align::Left)]);
        table.row(TextStyle::Plain, ["a".to_owned(), "10 us".to_owned(), String::new()]);
        table.row(TextStyle::Error, ["longer".to_owned(), "1 us".to_owned(), "two\nlines".to_owned()]);
        table
    }

    #[test]
    fn columns_are_aligned_and_lines_end_with_their_text() {
        let expected = "  name     time  why\n  a       10 us\n  longer   1 us  two lines\n";
        assert_eq!(example().render_within(Colour::Off, None), expected);
        assert_eq!(example().render_within(Colour::Off, Some(26)), expected);
    }

    #[test]
    fn the_widest_text_column_of_a_wide_table_is_wrapped() {
        let mut table =
            TextTable::new([("step", Align::Left), ("what", Align::Left), ("time", Align::Right)]);
        let what = "a keeper and a server run; this process is a client of both";
        table.row(TextStyle::Plain, ["serve".to_owned(), what.to_owned(), "25.1 ms".to_owned()]);
        table.row(
            TextStyle::Plain,
            ["put".to_owned(), "layers.0/attention.weight".to_owned(), "1 us".to_owned()],
        );
        let expected = [
            "  step   what                    time",
            "  serve  a keeper and a       25.1 ms",
            "         server run; this",
            "         process is a client",
            "         of both",
            "  put    layers.0/attention.     1 us",
            "         weight",
        ];
        let text = table.render_within(Colour::Off, Some(38));
        assert_eq!(text.lines().collect::<Vec<_>>(), expected);
        assert!(text.lines().all(|line| line.width() <= 38), "{text}");
    }

    #[test]
    fn equal_text_columns_of_a_wide_table_are_printed_once() {
        let columns =
            [("row", Align::Right), ("kind", Align::Left), ("index", Align::Left), ("us", Align::Right)];
        let mut table = TextTable::new(columns);
        for (row, index) in [("1", "i32"), ("2", "i64")] {
            table.row(TextStyle::Plain, [row, "continuous", index, "5"].map(str::to_owned));
        }
        let expected =
            "  all rows: kind continuous\n\n  row  index  us\n    1  i32     5\n    2  i64     5\n";
        assert_eq!(table.render_within(Colour::Off, Some(27)), expected);
    }

    #[test]
    fn control_characters_in_cells_are_escaped() {
        let mut table = TextTable::new([("name", Align::Left), ("size", Align::Right)]);
        table.row(TextStyle::Plain, ["gpj.\u{202e}exe".to_owned(), "1 B".to_owned()]);
        table.row(TextStyle::Plain, ["a\u{200b}\u{1b}[2J".to_owned(), "2 B".to_owned()]);
        let expected =
            "  name                size\n  gpj.\\u{202e}exe      1 B\n  a\\u{200b}\\u{1b}[2J   2 B\n";
        assert_eq!(table.render_within(Colour::Off, None), expected);
    }

    #[test]
    fn colours_do_not_change_the_alignment() {
        let coloured = example().render_within(Colour::On, None);
        let plain = coloured.replace("\x1b[1m", "").replace("\x1b[31m", "").replace("\x1b[0m", "");
        assert_eq!(plain, example().render_within(Colour::Off, None));
        assert_ne!(coloured, plain);
    }
}
