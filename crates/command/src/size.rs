//! Parsing and printing of byte counts with units: `64KiB`, `1.5 GiB`, `2G`.

use std::fmt;
use std::str::FromStr;

/// A number of bytes, parsed from a text with a unit. It is at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteCount(pub usize);

/// The reason why a text is not a byte count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ByteCountError {
    /// The text does not begin with a number.
    MissingNumber,
    /// The unit after the number is unknown.
    UnknownUnit(String),
    /// The size is not a whole number of bytes.
    FractionalByte,
    /// The size is zero, which is invalid.
    Zero,
    /// The size does not fit in `usize`.
    TooLarge,
}

impl std::error::Error for ByteCountError {}

impl fmt::Display for ByteCountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MissingNumber => f.write_str("a size begins with a number, such as `64KiB`"),
            Self::UnknownUnit(unit) => {
                write!(f, "`{unit}` is not a unit: use B, KiB, MiB, GiB or TiB, or K, M, G or T")
            }
            Self::FractionalByte => f.write_str("the size is not a whole number of bytes"),
            Self::Zero => f.write_str("a size is at least one byte"),
            Self::TooLarge => f.write_str("the size exceeds the address space"),
        }
    }
}

impl FromStr for ByteCount {
    type Err = ByteCountError;

    fn from_str(text: &str) -> Result<Self, ByteCountError> {
        let text = text.trim();
        let end = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
        if whole.is_empty() || part.is_empty() || part.contains('.') {
            return Err(ByteCountError::MissingNumber);
        }
        let unit = unit.trim();
        let shift = shift_of(unit).ok_or_else(|| ByteCountError::UnknownUnit(unit.to_owned()))?;

        let scale = u32::try_from(part.len()).ok().and_then(|digits| 10_u128.checked_pow(digits));
        let parse = |digits: &str| digits.parse::<u128>().ok();
        let (Some(whole), Some(part), Some(scale)) = (parse(whole), parse(part), scale) else {
            return Err(ByteCountError::TooLarge);
        };
        let part = part.checked_mul(1 << shift).ok_or(ByteCountError::TooLarge)?;
        if part % scale != 0 {
            return Err(ByteCountError::FractionalByte);
        }
        let bytes = whole.checked_mul(1 << shift).and_then(|bytes| bytes.checked_add(part / scale));
        match bytes.and_then(|bytes| usize::try_from(bytes).ok()) {
            None => Err(ByteCountError::TooLarge),
            Some(0) => Err(ByteCountError::Zero),
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

/// Displays a byte count rounded to a tenth of its unit: `23.5 GiB`.
#[derive(Debug, Clone, Copy)]
pub struct RoundedSize(pub usize);

impl fmt::Display for RoundedSize {
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

    fn parse(text: &str) -> Result<usize, ByteCountError> {
        text.parse().map(|ByteCount(bytes)| bytes)
    }

    #[test]
    fn all_units_and_spellings_are_parsed() {
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
    fn invalid_sizes_are_rejected_with_a_reason() {
        for (text, error) in [
            ("", ByteCountError::MissingNumber),
            ("MiB", ByteCountError::MissingNumber),
            ("-1", ByteCountError::MissingNumber),
            (".5G", ByteCountError::MissingNumber),
            ("5.G", ByteCountError::MissingNumber),
            ("1.2.3K", ByteCountError::MissingNumber),
            ("1GB", ByteCountError::UnknownUnit("GB".to_owned())),
            ("1 K iB", ByteCountError::UnknownUnit("K iB".to_owned())),
            ("1e9", ByteCountError::UnknownUnit("e9".to_owned())),
            ("1.5", ByteCountError::FractionalByte),
            ("0.0001K", ByteCountError::FractionalByte),
            ("0", ByteCountError::Zero),
            ("0.0GiB", ByteCountError::Zero),
            ("16777216T", ByteCountError::TooLarge),
            ("99999999999999999999999999999999999999999", ByteCountError::TooLarge),
            ("1.00000000000000000000000000000000000000000K", ByteCountError::TooLarge),
        ] {
            assert_eq!(parse(text), Err(error), "{text:?}");
        }
    }

    #[test]
    fn printed_sizes_parse_to_the_same_value() {
        for bytes in [1, 1023, 1024, 1536, 64 << 10, 1536 << 20, 1 << 40, (2 << 20) + 1] {
            assert_eq!(parse(&Size(bytes).to_string()), Ok(bytes));
        }
    }

    #[test]
    fn rounded_sizes_have_at_most_one_decimal() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (64 << 10, "64 KiB"),
            ((64 << 10) + 1, "64 KiB"),
            (25_194_139_648, "23.5 GiB"),
            (1 << 40, "1 TiB"),
        ] {
            assert_eq!(RoundedSize(bytes).to_string(), text);
        }
        assert_eq!(format!("{:>8}", RoundedSize(1024)), "   1 KiB");
    }
}
