//! Code in colours: comments, strings and the words of the language, by their outward look.
//!
//! It reads no grammar, and changes nothing but colours: without its marks, the text is what it was.

/// What is told apart in a language.
#[derive(Debug)]
struct Language {
    names: &'static [&'static str],
    /// What begins a comment, to the end of the line.
    comment: &'static str,
    quotes: &'static [char],
    words: &'static [&'static str],
}

const LANGUAGES: &[Language] = &[
    Language {
        names: &["rust", "rs"],
        comment: "//",
        // Not the single one, which begins a lifetime too.
        quotes: &['"'],
        words: &[
            "as", "async", "await", "break", "const", "continue", "crate", "else", "enum", "false", "fn",
            "for", "if", "impl", "in", "let", "loop", "match", "mod", "move", "mut", "pub", "ref", "return",
            "self", "static", "struct", "super", "trait", "true", "type", "unsafe", "use", "where", "while",
        ],
    },
    Language {
        names: &["python", "py"],
        comment: "#",
        quotes: &['"', '\''],
        words: &[
            "False", "None", "True", "and", "as", "assert", "async", "await", "break", "class", "continue",
            "def", "del", "elif", "else", "except", "finally", "for", "from", "global", "if", "import", "in",
            "is", "lambda", "nonlocal", "not", "or", "pass", "raise", "return", "try", "while", "with",
            "yield",
        ],
    },
    Language { names: &["sh", "bash", "console"], comment: "#", quotes: &['"', '\''], words: &[] },
    Language {
        names: &["cu", "cuh", "c", "cpp"],
        comment: "//",
        quotes: &['"'],
        words: &[
            "auto",
            "bool",
            "break",
            "char",
            "const",
            "constexpr",
            "continue",
            "else",
            "enum",
            "extern",
            "float",
            "for",
            "if",
            "inline",
            "int",
            "namespace",
            "return",
            "sizeof",
            "static",
            "struct",
            "template",
            "typename",
            "unsigned",
            "using",
            "void",
            "while",
        ],
    },
];

/// Code as HTML; in a language that is not known, without colours.
pub(crate) fn code(language: &str, text: &str) -> String {
    let Some(language) = LANGUAGES.iter().find(|known| known.names.contains(&language)) else {
        return escaped(text);
    };
    let mut html = String::new();
    let mut rest = text;
    // What stands before decides whether a sign begins something, or is inside a word.
    let mut before = '\n';
    while let Some(first) = rest.chars().next() {
        let (class, len) = language.first(rest, first, before);
        let (part, left) = rest.split_at(len);
        match class {
            Some(class) => html.push_str(&format!("<span class=\"{class}\">{}</span>", escaped(part))),
            None => html.push_str(&escaped(part)),
        }
        before = part.chars().next_back().unwrap_or(first);
        rest = left;
    }
    html
}

impl Language {
    /// The class of what a text begins with, and how long that is.
    fn first(&self, text: &str, first: char, before: char) -> (Option<&'static str>, usize) {
        let line = text.find('\n').unwrap_or(text.len());
        if before == '\n' {
            for prompt in [">>> ", "... ", "$ "] {
                if text.starts_with(prompt) {
                    return (Some("prompt"), prompt.len());
                }
            }
        }
        if text.starts_with(self.comment) && before.is_whitespace() {
            return (Some("comment"), line);
        }
        if self.quotes.contains(&first) && !before.is_alphanumeric() {
            let triple: String = [first; 3].iter().collect();
            if text.starts_with(&triple) {
                let end = text[3..].find(&triple).map_or(text.len(), |at| at + 6);
                return (Some("string"), end);
            }
            if let Some(len) = quoted(&text[..line], first) {
                return (Some("string"), len);
            }
        }
        if first.is_alphanumeric() || first == '_' {
            let len = text.find(|sign: char| !sign.is_alphanumeric() && sign != '_').unwrap_or(text.len());
            return (self.words.contains(&&text[..len]).then_some("word"), len);
        }
        (None, first.len_utf8())
    }
}

/// How long a string in quotes is, if it ends on its line.
fn quoted(line: &str, quote: char) -> Option<usize> {
    let mut escape = false;
    for (at, sign) in line.char_indices().skip(1) {
        if sign == quote && !escape {
            return Some(at + 1);
        }
        escape = sign == '\\' && !escape;
    }
    None
}

/// A text as HTML shows it.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_strings_and_comments_are_told_apart() {
        assert_eq!(
            code("python", "for x in ['#', \"in\"]:  # in\n"),
            "<span class=\"word\">for</span> x <span class=\"word\">in</span> \
             [<span class=\"string\">'#'</span>, <span class=\"string\">&quot;in&quot;</span>]:  \
             <span class=\"comment\"># in</span>\n"
        );
    }

    #[test]
    fn what_only_looks_like_something_is_left_alone() {
        for text in ["foreign[x#y]", "it's", "f'", "http://x", "a\" b"] {
            assert_eq!(code("rust", text), escaped(text), "{text}");
        }
    }

    #[test]
    fn nothing_is_lost() {
        let text = "fn f<'a>(x: &'a str) -> char { \"\\\"\\\\\" /* ü */ } // \"\n\"open";
        for language in ["rust", "python", "sh", "cuh", "text"] {
            let mut html = code(language, text).replace("</span>", "");
            for class in ["word", "string", "comment", "prompt"] {
                html = html.replace(&format!("<span class=\"{class}\">"), "");
            }
            assert_eq!(html, escaped(text), "{language}");
        }
    }

    #[test]
    fn a_prompt_is_one_at_the_beginning_of_a_line_only() {
        assert_eq!(code("console", "$ ls $ x\n"), "<span class=\"prompt\">$ </span>ls $ x\n");
    }
}
