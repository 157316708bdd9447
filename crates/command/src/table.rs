//! Text tables on stdout: aligned columns with headings and without borders.

use comfy_table::{CellAlignment, presets};

use crate::terminal::{self, Colour, TextStyle};

/// The alignment of a column in a text table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// The column is left-aligned.
    Left,
    /// The column is right-aligned.
    Right,
}

/// A text table in which each row has a style, such as a colour.
#[derive(Debug)]
pub struct TextTable {
    table: comfy_table::Table,
    styles: Vec<TextStyle>,
}

impl TextTable {
    /// Creates a text table with the given columns and no rows.
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
        Self { table, styles: vec![TextStyle::Heading] }
    }

    /// Adds a row to the table.
    pub fn row<const N: usize>(&mut self, style: TextStyle, cells: [String; N]) {
        // Line breaks are replaced, because they would split the row. Control characters are escaped, because cells may contain
        // names that other users chose.
        self.table.add_row(cells.map(|cell| terminal::escaped(&cell.replace('\n', " "))));
        self.styles.push(style);
    }

    /// Returns the table as text, with each line indented by two spaces.
    pub fn render(&self, colour: Colour) -> String {
        let lines = self.table.lines().zip(&self.styles);
        lines.map(|(line, style)| format!("  {}\n", colour.paint(*style, line.trim_end()))).collect()
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
        assert_eq!(example().render(Colour::Off), expected);
    }

    #[test]
    fn control_characters_in_cells_are_escaped() {
        let mut table = TextTable::new([("name", Align::Left), ("size", Align::Right)]);
        table.row(TextStyle::Plain, ["gpj.\u{202e}exe".to_owned(), "1 B".to_owned()]);
        table.row(TextStyle::Plain, ["a\u{200b}\u{1b}[2J".to_owned(), "2 B".to_owned()]);
        let expected =
            "  name                size\n  gpj.\\u{202e}exe      1 B\n  a\\u{200b}\\u{1b}[2J   2 B\n";
        assert_eq!(table.render(Colour::Off), expected);
    }

    #[test]
    fn colours_do_not_change_the_alignment() {
        let coloured = example().render(Colour::On);
        let plain = coloured.replace("\x1b[1m", "").replace("\x1b[31m", "").replace("\x1b[0m", "");
        assert_eq!(plain, example().render(Colour::Off));
        assert_ne!(coloured, plain);
    }
}
