//! Byte counts as people write and read them: `64KiB`, `1.5 GiB`, `2G`.

use std::fmt;
use std::str::FromStr;

/// A number of bytes, at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteCount(pub usize);

/// Why a text is no number of bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParseError {
    /// It does not begin with a number.
    NoNumber,
    /// Its unit is none of the known ones.
    UnknownUnit(String),
    /// It is not a whole number of bytes.
    PartOfAByte,
    /// It is zero.
    Zero,
    /// It does not fit in the addresses of a machine.
    TooLarge,
}

impl std::error::Error for ParseError {}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoNumber => f.write_str("it does not begin with a number, as `64KiB` does"),
            Self::UnknownUnit(unit) => {
                write!(f, "`{unit}` is not a unit: use B, KiB, MiB, GiB or TiB, or K, M, G or T for short")
            }
            Self::PartOfAByte => f.write_str("it is not a whole number of bytes"),
            Self::Zero => f.write_str("it must be at least one byte"),
            Self::TooLarge => f.write_str("no machine has that many bytes"),
        }
    }
}

impl FromStr for ByteCount {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let text = text.trim();
        let end = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
        if whole.is_empty() || part.is_empty() || part.contains('.') {
            return Err(ParseError::NoNumber);
        }
        let unit = unit.trim();
        let shift = shift_of(unit).ok_or_else(|| ParseError::UnknownUnit(unit.to_owned()))?;

        let scale = u32::try_from(part.len()).ok().and_then(|digits| 10_u128.checked_pow(digits));
        let parse = |digits: &str| digits.parse::<u128>().ok();
        let (Some(whole), Some(part), Some(scale)) = (parse(whole), parse(part), scale) else {
            return Err(ParseError::TooLarge);
        };
        let part = part.checked_mul(1 << shift).ok_or(ParseError::TooLarge)?;
        if part % scale != 0 {
            return Err(ParseError::PartOfAByte);
        }
        let bytes = whole.checked_mul(1 << shift).and_then(|bytes| bytes.checked_add(part / scale));
        match bytes.and_then(|bytes| usize::try_from(bytes).ok()) {
            None => Err(ParseError::TooLarge),
            Some(0) => Err(ParseError::Zero),
            Some(bytes) => Ok(Self(bytes)),
        }
    }
}

fn shift_of(unit: &str) -> Option<u32> {
    let units: [(&[&str], u32); 5] =
        [(&["", "b"], 0), (&["kib", "k"], 10), (&["mib", "m"], 20), (&["gib", "g"], 30), (&["tib", "t"], 40)];
    let unit = unit.to_ascii_lowercase();
    units.iter().find(|(names, _)| names.contains(&unit.as_str())).map(|(_, shift)| *shift)
}

/// Displays a byte count to a tenth of its unit, where the last byte is not the point.
#[derive(Debug, Clone, Copy)]
pub struct Rough(pub usize);

impl fmt::Display for Rough {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        let text = match units.iter().find(|(_, shift)| self.0 >> shift != 0) {
            None => format!("{} B", self.0),
            Some((unit, shift)) => {
                let tenths = (self.0 as f64 * 10.0 / (1_u64 << shift) as f64).round();
                if tenths % 10.0 == 0.0 {
                    format!("{} {unit}", tenths / 10.0)
                } else {
                    format!("{:.1} {unit}", tenths / 10.0)
                }
            }
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use wholemem_os::Size;

    use super::*;

    fn parse(text: &str) -> Result<usize, ParseError> {
        text.parse().map(|ByteCount(bytes)| bytes)
    }

    #[test]
    fn every_unit_is_understood_in_every_form() {
        for (text, bytes) in [
            ("1", 1),
            ("4096B", 4096),
            ("64KiB", 64 << 10),
            ("64 kib", 64 << 10),
            ("64k", 64 << 10),
            ("2M", 2 << 20),
            ("256MiB", 256 << 20),
            ("1.5GiB", 1536 << 20),
            (" 1.25 KiB ", 1280),
            ("1g", 1 << 30),
            ("3TiB", 3 << 40),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text:?}");
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_its_reason() {
        for (text, error) in [
            ("", ParseError::NoNumber),
            ("MiB", ParseError::NoNumber),
            ("-1", ParseError::NoNumber),
            (".5G", ParseError::NoNumber),
            ("5.G", ParseError::NoNumber),
            ("1.2.3K", ParseError::NoNumber),
            ("1GB", ParseError::UnknownUnit("GB".to_owned())),
            ("1 K iB", ParseError::UnknownUnit("K iB".to_owned())),
            ("1e9", ParseError::UnknownUnit("e9".to_owned())),
            ("1.5", ParseError::PartOfAByte),
            ("0.0001K", ParseError::PartOfAByte),
            ("0", ParseError::Zero),
            ("0.0GiB", ParseError::Zero),
            ("16777216T", ParseError::TooLarge),
            ("99999999999999999999999999999999999999999", ParseError::TooLarge),
            ("1.00000000000000000000000000000000000000000K", ParseError::TooLarge),
        ] {
            assert_eq!(parse(text), Err(error), "{text:?}");
        }
    }

    #[test]
    fn what_sizes_are_printed_as_can_be_given_back() {
        for bytes in [1, 1023, 1024, 1536, 64 << 10, 1536 << 20, 1 << 40, (2 << 20) + 1] {
            assert_eq!(parse(&Size(bytes).to_string()), Ok(bytes));
        }
    }

    #[test]
    fn rough_sizes_keep_a_tenth() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (64 << 10, "64 KiB"),
            ((64 << 10) + 1, "64 KiB"),
            (25_194_139_648, "23.5 GiB"),
            (1 << 40, "1 TiB"),
        ] {
            assert_eq!(Rough(bytes).to_string(), text);
        }
        assert_eq!(format!("{:>8}", Rough(1024)), "   1 KiB");
    }
}
