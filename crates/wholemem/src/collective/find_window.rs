//! Finds the registered window in which the memory of a call lies, so that the call needs no staging copy.

use std::ops::Range;
use std::sync::Arc;

use wholemem_hal::{Attempt, Rights, Span, Stream};
use wholemem_os::width::to_usize;

use super::Lane;
use super::kernel::CollectiveKind;
use super::memory_watch::MemoryWatch;
use super::window::{Buffer, Window};

/// The range of a window in which the memory of an operand was found to lie.
#[derive(Debug, Clone)]
pub(super) struct RegisteredRange {
    window: Window,
    range: Range<usize>,
}

impl RegisteredRange {
    pub(super) fn buffer(&self) -> Buffer<'_> {
        self.window.range(self.range.clone())
    }
}

/// Memory that is the input or output of a call, and the number of its bytes that the call uses.
type UsedSpan<'a> = (&'a Span, usize);

impl Lane {
    /// Returns the ranges of windows in which the input and the output of a call lie. Each operand is passed with the number of
    /// bytes that the call uses, because a span may be longer, by a different length on each rank. The result is `None` for
    /// memory in no window, and for a buffer that was passed as a window.
    #[inline]
    pub(super) fn find_windows(
        &self,
        stream: &Stream,
        kind: CollectiveKind,
        (input, input_len): (&Buffer<'_>, u64),
        (output, output_len): (&Buffer<'_>, u64),
    ) -> [Option<RegisteredRange>; 2] {
        // The input of an all-gather in place is this rank's part of the output, at another offset on each rank.
        let is_own_part = kind == CollectiveKind::AllGather && input.is_part_of(output);
        let [from, to] = [(input, input_len), (output, output_len)].map(|(buffer, len)| match buffer {
            Buffer::Own(span) => Some((*span, to_usize(len).min(span.len()))),
            Buffer::Window { .. } => None,
        });
        let from = from.filter(|_| !is_own_part);
        // A call in place has one buffer, which is looked up once.
        let is_same =
            |from: UsedSpan<'_>, to: UsedSpan<'_>| (from.0.address(), from.1) == (to.0.address(), to.1);
        let mut found = match (from, to) {
            (Some(from), Some(to)) if is_same(from, to) => {
                let found = self.find_window(to, Rights::ReadWrite);
                [found.clone(), found]
            }
            _ => [
                from.and_then(|used| self.find_window(used, Rights::Read)),
                to.and_then(|used| self.find_window(used, Rights::ReadWrite)),
            ],
        };
        if self.recorder.is_active() && stream.is_capturing() {
            self.record(&mut found, [from, to]);
        }
        // Memory that its owner can free is checked before each launch of a graph.
        for memory in found.iter().flatten().filter_map(|range| range.window.core().memory.as_ref()) {
            stream.check_at_launch(Arc::<MemoryWatch>::clone(memory));
        }
        found
    }

    /// Records those operands of a captured call that lie in no window.
    #[cold]
    fn record(&self, found: &mut [Option<RegisteredRange>; 2], spans: [Option<UsedSpan<'_>>; 2]) {
        let device = self.group.device();
        for index in 0..2 {
            let Some((span, len)) = spans[index].filter(|(_, len)| *len > 0 && found[index].is_none()) else {
                continue;
            };
            if span.check(device, Rights::Read, || Attempt::Access { len: span.len() }).is_err() {
                // A later check of the operands returns the error.
                return;
            }
            let Ok(used) = span.part(0, len) else { unreachable!("a call uses at most the whole span") };
            let is_same =
                |(other, other_len): &UsedSpan<'_>| (other.address(), *other_len) == (span.address(), len);
            let window = match (index, spans[0].filter(is_same), &found[0]) {
                // The call is in place: its output is the input, which was recorded above.
                (1, Some(_), Some(input)) => Some(input.window.clone()),
                _ => self.recorder.record(&used),
            };
            found[index] = window.map(|window| RegisteredRange { window, range: 0..len });
        }
    }

    /// Returns the range of a window in which memory of this rank lies, if every rank's part of the window has this range, and
    /// this rank has the needed rights.
    #[inline]
    fn find_window(&self, (span, len): UsedSpan<'_>, needed: Rights) -> Option<RegisteredRange> {
        let (core, offset) = self.index.find(span.address(), len)?;
        let device = self.group.device();
        // A call on memory without the rights is an error, which the checks of memory outside of windows report.
        span.check(device, needed, || Attempt::Access { len: span.len() }).ok()?;
        if core.memory.as_ref().is_some_and(|memory| !memory.has(span)) {
            // The memory was freed, and its address may be that of other memory now, which no other rank has mapped.
            self.index.remove(core.id);
            return None;
        }
        Some(RegisteredRange { window: Window::of(core), range: offset..offset + len })
    }
}
