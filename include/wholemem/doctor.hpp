// The report of which features work on this machine.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <wholemem.h>
#include <wholemem/error.hpp>
#include <wholemem/handle.hpp>

namespace wholemem {

/// The format of a report.
enum class ReportFormat : wm_report_format_t {
    /// Lines for people.
    Text = WM_REPORT_TEXT,
    /// The JSON of `wholemem doctor --json`.
    Json = WM_REPORT_JSON,
};

/// Tries every feature of every device of this machine, and returns a report of which work, and why others do not.
[[nodiscard]] inline std::string doctor(ReportFormat format = ReportFormat::Text)
{
    check_version();
    wm_text_t text = {};
    check(wm_doctor(static_cast<wm_report_format_t>(format), &text));
    const detail::Handle<wm_text_t, wm_text_destroy> owner(text);
    const char *characters = nullptr;
    std::uint64_t len = 0;
    check(wm_text_data(text, &characters, &len));
    return std::string(characters, static_cast<std::size_t>(len));
}

} // namespace wholemem
