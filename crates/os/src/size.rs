//! Byte counts formatted for people: `64 KiB`, `2 MiB`, `1.5 GiB`.

use std::fmt;

/// Displays a byte count in the largest binary unit that represents it exactly with at most one digit after the
/// decimal point.
///
/// ```
/// use wholemem_os::Size;
///
/// assert_eq!(Size(0).to_string(), "0 B");
/// assert_eq!(Size(3 << 20).to_string(), "3 MiB");
/// assert_eq!(Size(1536 << 20).to_string(), "1.5 GiB");
/// assert_eq!(Size((2 << 20) + 1).to_string(), "2097153 B");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub usize);

const UNITS: [(&str, u32); 6] =
    [("EiB", 60), ("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        let text = UNITS
            .iter()
            .find(|(_, shift)| bytes >> shift != 0)
            .and_then(|(unit, shift)| {
                // A byte count that has more than one digit after the decimal point in the larger unit is printed in
                // bytes, so that an error message never rounds a difference away.
                let whole = bytes >> shift;
                let rest = (bytes & ((1 << shift) - 1)) as u128;
                match (rest * 10) >> shift {
                    _ if rest == 0 => Some(format!("{whole} {unit}")),
                    tenths if (tenths << shift) == rest * 10 => Some(format!("{whole}.{tenths} {unit}")),
                    _ => None,
                }
            })
            .unwrap_or_else(|| format!("{bytes} B"));
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_exact_unit_is_used() {
        for (bytes, text) in [
            (1, "1 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (64 << 20, "64 MiB"),
            (usize::MAX, "18446744073709551615 B"),
            (1 << 60, "1 EiB"),
        ] {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }

    #[test]
    fn format_padding_is_applied() {
        assert_eq!(format!("{:>8}", Size(1024)), "   1 KiB");
    }
}
