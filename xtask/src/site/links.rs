//! The links of the finished site: each leads to a file that is there, and to a place that is in it.
//!
//! Read from the pages as they are, so that it does not matter who wrote them. Other sites are not asked.

use std::collections::BTreeSet;

use super::address;

/// What a page refers to, and can be referred to by.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) links: Vec<String>,
    pub(crate) places: BTreeSet<String>,
}

/// The links and the places of a page.
pub(crate) fn read(html: &str) -> Page {
    let mut page = Page::default();
    for tag in html.split('<').skip(1).filter_map(|from| from.split_once('>')).map(|(tag, _)| tag) {
        for name in ["href", "src"] {
            page.links.extend(attribute(tag, name).map(|link| link.replace("&amp;", "&")));
        }
        page.places.extend(attribute(tag, "id").map(str::to_owned));
    }
    page
}

/// The value of an attribute in a tag.
fn attribute<'a>(tag: &'a str, name: &str) -> Option<&'a str> {
    let (_, from) = tag.split_once(&format!(" {name}=\""))?;
    from.split_once('"').map(|(value, _)| value)
}

/// A link to another site, which is not looked at.
fn is_elsewhere(link: &str) -> bool {
    ["https://", "http://", "mailto:"].iter().any(|start| link.starts_with(start))
}

/// The file and the place that a link on a page leads to; an error, if it cannot lead anywhere from a disk.
fn lead(page: &str, link: &str) -> Result<(String, String), String> {
    let (path, place) = link.split_once('#').unwrap_or((link, ""));
    if path.is_empty() {
        return Ok((page.to_owned(), place.to_owned()));
    }
    let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
    match address::joined(folder, path) {
        Some(file) if !path.contains(':') => Ok((file, place.to_owned())),
        _ => Err(format!("{page}: `{link}` leads out of the site")),
    }
}

/// What is wrong with the links of a page. `places` has the places of a file of the site; `None`, if there is none.
pub(crate) fn broken(
    name: &str,
    page: &Page,
    mut places: impl FnMut(&str) -> Option<BTreeSet<String>>,
) -> Vec<String> {
    let mut findings = Vec::new();
    for link in page.links.iter().filter(|link| !is_elsewhere(link)) {
        let (file, place) = match lead(name, link) {
            Ok(led) => led,
            Err(finding) => {
                findings.push(finding);
                continue;
            }
        };
        match places(&file) {
            None => findings.push(format!("{name}: `{link}` leads to {file}, which is not there")),
            Some(there) if !place.is_empty() && !there.contains(&place) => {
                findings.push(format!("{name}: `{link}` leads to a place that {file} does not have"));
            }
            Some(_) => {}
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const HTML: &str = r##"<h1 id="top">A</h1> a href="no" <a class="x" href="b.html?a=1&amp;b=2#c">b</a>
        <img src="../p.svg" alt="&lt;" /> <a href="https://example.org">x</a> <code>&lt;a href="no"></code>"##;

    #[test]
    fn links_and_places_are_read_from_tags_only() {
        let page = read(HTML);
        assert_eq!(page.links, ["b.html?a=1&b=2#c", "../p.svg", "https://example.org"]);
        assert_eq!(page.places, BTreeSet::from(["top".to_owned()]));
    }

    #[test]
    fn a_missing_file_a_missing_place_and_a_way_out_are_found() {
        let links = [
            "here.html#yes",
            "#own",
            "gone.html",
            "here.html#no",
            "/x.html",
            "../../x.html",
            "../a/here.html",
        ];
        let page = Page { links: links.map(str::to_owned).into(), places: BTreeSet::new() };
        let places = |file: &str| match file {
            "a/here.html" => Some(BTreeSet::from(["yes".to_owned()])),
            "a/b.html" => Some(BTreeSet::from(["own".to_owned()])),
            _ => None,
        };
        assert_eq!(
            broken("a/b.html", &page, places),
            [
                "a/b.html: `gone.html` leads to a/gone.html, which is not there",
                "a/b.html: `here.html#no` leads to a place that a/here.html does not have",
                "a/b.html: `/x.html` leads out of the site",
                "a/b.html: `../../x.html` leads out of the site",
            ]
        );
    }
}
