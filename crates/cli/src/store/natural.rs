//! Natural order of names: numbers in names are ordered by their value, so that `layers.2` is before `layers.10`.

use std::cmp::Ordering;

/// Compares two names in natural order. Names that differ only in leading zeros are ordered by their bytes.
pub(super) fn compare(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a.as_bytes(), b.as_bytes());
    while let (Some(first), Some(second)) = (left.first(), right.first()) {
        if first.is_ascii_digit() && second.is_ascii_digit() {
            let (one, two) = (take_number(&mut left), take_number(&mut right));
            match one.len().cmp(&two.len()).then_with(|| one.cmp(two)) {
                Ordering::Equal => {}
                differ => return differ,
            }
        } else if first == second {
            (left, right) = (&left[1..], &right[1..]);
        } else {
            return first.cmp(second);
        }
    }
    left.len().cmp(&right.len()).then_with(|| a.cmp(b))
}

/// Removes the digits at the beginning of a text, and returns them without leading zeros.
fn take_number<'a>(text: &mut &'a [u8]) -> &'a [u8] {
    let len = text.iter().take_while(|letter| letter.is_ascii_digit()).count();
    let (digits, rest) = text.split_at(len);
    *text = rest;
    let zeros = digits.iter().take_while(|digit| **digit == b'0').count();
    &digits[zeros..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_ordered_by_value() {
        let mut names = ["m/10.b", "m/9", "m/10.a", "m", "m/010", "m/1", "n", "m/", "m/10", "m/2x", "é"];
        names.sort_by(|a, b| compare(a, b));
        assert_eq!(names, ["m", "m/", "m/1", "m/2x", "m/9", "m/010", "m/10", "m/10.a", "m/10.b", "n", "é"]);
    }

    #[test]
    fn the_order_is_total() {
        let names = [
            "",
            "0",
            "00",
            "a0",
            "a00",
            "a0b",
            "a00b",
            "a1",
            "99999999999999999999999",
            "100000000000000000000000",
        ];
        for a in names {
            for b in names {
                assert_eq!(compare(a, b), compare(b, a).reverse(), "{a:?} {b:?}");
                assert_eq!(compare(a, b) == Ordering::Equal, a == b, "{a:?} {b:?}");
                for c in names {
                    let ordered = compare(a, b).is_le() && compare(b, c).is_le();
                    assert!(!ordered || compare(a, c).is_le(), "{a:?} {b:?} {c:?}");
                }
            }
        }
    }
}
