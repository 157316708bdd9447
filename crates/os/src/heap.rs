//! Returns freed heap memory of this process to the kernel.
//!
//! ```
//! drop(vec![0_u8; 1 << 20]);
//! wholemem_os::heap::trim();
//! ```

/// Returns freed heap memory, which glibc otherwise retains for reuse, to the kernel. The call scans all free memory,
/// so it is meant for use after large amounts were freed.
#[doc(alias = "malloc_trim")]
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim` takes no pointers, and locks the allocator's arenas itself.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn memory_is_usable_after_a_trim() {
        let live = vec![7_u8; 100_000];
        drop(vec![1_u8; 1 << 20]);
        super::trim();
        assert!(live.iter().all(|byte| *byte == 7));
    }
}
