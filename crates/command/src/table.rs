//! Tables for people: columns aligned, a row of headings, nothing around them.

use comfy_table::{CellAlignment, presets};

use crate::terminal::{self, Colour, Tone};

/// Where the text of a column stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// At the left.
    Left,
    /// At the right.
    Right,
}

/// A table whose rows have a tone.
#[derive(Debug)]
pub struct Table {
    table: comfy_table::Table,
    tones: Vec<Tone>,
}

impl Table {
    /// A table with these columns and no rows.
    pub fn new<const N: usize>(columns: [(&str, Align); N]) -> Self {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::NOTHING).set_header(columns.map(|(name, _)| name));
        for (column, (_, align)) in table.column_iter_mut().zip(columns) {
            column.set_padding((0, 2));
            column.set_cell_alignment(match align {
                Align::Left => CellAlignment::Left,
                Align::Right => CellAlignment::Right,
            });
        }
        Self { table, tones: vec![Tone::Strong] }
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, tone: Tone, cells: [String; N]) {
        // A cell of several lines would be several rows, and some text in cells is anybody's.
        self.table.add_row(cells.map(|cell| terminal::plain(&cell.replace('\n', " "))));
        self.tones.push(tone);
    }

    /// The table, each line indented by two.
    pub fn render(&self, colour: Colour) -> String {
        let lines = self.table.lines().zip(&self.tones);
        lines.map(|(line, tone)| format!("  {}\n", colour.paint(*tone, line.trim_end()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Table {
        let mut table = Table::new([("name", Align::Left), ("time", Align::Right), ("why", Align::Left)]);
        table.row(Tone::Plain, ["a".to_owned(), "10 us".to_owned(), String::new()]);
        table.row(Tone::Bad, ["longer".to_owned(), "1 us".to_owned(), "two\nlines".to_owned()]);
        table
    }

    #[test]
    fn columns_are_aligned_and_lines_end_with_their_text() {
        let expected = "  name     time  why\n  a       10 us\n  longer   1 us  two lines\n";
        assert_eq!(example().render(Colour::Off), expected);
    }

    #[test]
    fn cells_show_what_cannot_be_seen() {
        let mut table = Table::new([("name", Align::Left), ("size", Align::Right)]);
        table.row(Tone::Plain, ["gpj.\u{202e}exe".to_owned(), "1 B".to_owned()]);
        table.row(Tone::Plain, ["a\u{200b}\u{1b}[2J".to_owned(), "2 B".to_owned()]);
        let expected =
            "  name                size\n  gpj.\\u{202e}exe      1 B\n  a\\u{200b}\\u{1b}[2J   2 B\n";
        assert_eq!(table.render(Colour::Off), expected);
    }

    #[test]
    fn colour_changes_no_column() {
        let coloured = example().render(Colour::On);
        let plain = coloured.replace("\x1b[1m", "").replace("\x1b[31m", "").replace("\x1b[0m", "");
        assert_eq!(plain, example().render(Colour::Off));
        assert_ne!(coloured, plain);
    }
}
