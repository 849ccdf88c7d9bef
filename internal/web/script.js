(() => {
const $ = (s, r = document) => r.querySelector(s), $$ = (s, r = document) => [...r.querySelectorAll(s)];
const target = () => { const id = decodeURIComponent(location.hash.slice(1)); return id && document.getElementById(id) };

// Copying.
async function copy(button) {
  const node = button.previousElementSibling;
  try { await navigator.clipboard.writeText(node.textContent) } catch {
    const s = getSelection(), r = document.createRange();
    r.selectNodeContents(node); s.removeAllRanges(); s.addRange(r); document.execCommand('copy');
  }
  button.textContent = 'Copied';
  setTimeout(() => button.textContent = 'Copy', 1200);
}

// The chosen device has a ring, and its panel has buttons.
function opened() {
  for (const x of $$('.sel')) x.classList.remove('sel');
  const t = target();
  if (!t) return;
  for (const a of $$('.machine a[href="#' + CSS.escape(t.id) + '"]')) a.parentElement.classList.add('sel');
  const panel = t.closest('.panel');
  if (!panel) return;
  for (const c of $$('.copy:not(:has(button))', panel)) {
    const b = document.createElement('button');
    b.type = 'button'; b.textContent = 'Copy';
    c.append(b);
  }
}
addEventListener('hashchange', opened);

// The filter: words that must all occur in what is shown of a device or pod.
const form = $('.filter'), q = $('#q');
function filter() {
  if (!form) return;
  const words = q.value.toLowerCase().split(/\s+/).filter(Boolean);
  let hits = 0, all = 0;
  for (const e of $$('.dev,.tile,.cells>li,.holders tbody tr')) {
    const link = $('a[title]', e), text = ((link ? link.title : '') + ' ' + (e.dataset.pod || '') + ' ' + e.textContent).toLowerCase();
    const hit = words.every(w => text.includes(w));
    e.classList.toggle('dim', !hit);
    if (e.tagName === 'LI') { all++; hits += hit }
  }
  $('output', form).textContent = words.length ? hits + ' of ' + all : '';
}
if (form) { form.hidden = false; q.oninput = filter; form.onsubmit = e => e.preventDefault() }

// What the same pod has.
function mates(e) {
  const of = e && e.target.closest && e.target.closest('[data-pod]'), pod = of && of.dataset.pod;
  for (const o of $$('[data-pod]')) o.classList.toggle('mate', !!pod && o.dataset.pod === pod);
}
addEventListener('mouseover', mates);
addEventListener('focusin', mates);

// Opening and closing.
let from = null;
function close() {
  if (!location.hash) return;
  const y = scrollY, id = location.hash.slice(1);
  location.hash = '';
  history.replaceState('', '', location.pathname + location.search);
  scrollTo(0, y);
  const back = from && from.isConnected ? from : $('.machine a[href="#' + CSS.escape(decodeURIComponent(id)) + '"]');
  if (back) back.focus({ preventScroll: true });
}
addEventListener('click', e => {
  if (!e.target.closest) return;
  const button = e.target.closest('.copy button');
  if (button) return copy(button);
  if (e.target.closest('.x')) { e.preventDefault(); return close() }
  const a = e.target.closest('a[href^="#"]');
  if (a && !a.closest('.panel')) from = a;
});
addEventListener('keydown', e => {
  const typing = /INPUT|TEXTAREA/.test(e.target.tagName);
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.key === '/' && !typing && form) { e.preventDefault(); q.focus() }
  else if (e.key === 'Escape') { if (q && q.value) { q.value = ''; filter() } else close() }
  else if (/^Arrow/.test(e.key) && !typing) arrow(e);
});

// Arrows go to the nearest device in their direction, also from the open panel.
function arrow(e) {
  const all = $$('.machine :is(.dev,.tile,.cells>li):not(.dim)>a'), at = document.activeElement;
  let i = all.indexOf(at);
  if (i < 0 && /Left|Right/.test(e.key) && (at === document.body || at.closest('.panel'))) i = all.findIndex(a => a.parentElement.classList.contains('sel'));
  if (i < 0) return;
  const dx = (e.key === 'ArrowRight') - (e.key === 'ArrowLeft'), dy = (e.key === 'ArrowDown') - (e.key === 'ArrowUp');
  const r = all[i].getBoundingClientRect();
  let best = null, least = Infinity;
  for (const o of all) {
    if (o === all[i]) continue;
    const b = o.getBoundingClientRect(), x = b.left - r.left, y = b.top - r.top;
    const along = x * dx + y * dy, off = Math.abs(x * dy) + Math.abs(y * dx);
    if (along > 2 && along + 3 * off < least) { best = o; least = along + 3 * off }
  }
  if (!best) return;
  e.preventDefault();
  best.focus();
  if (location.hash) best.click();
}

function decorate() {
  for (const m of $$('.cells')) $$('a', m).slice(1).forEach(a => a.tabIndex = -1);
  opened();
  filter();
}

// Live: a revision arrives, the page fetches itself and takes over what differs.
// Elements are told apart by id and stay where they are, so focus, filter, panel and
// scroll stay too.
const own = ['sel', 'mate', 'dim', 'flash'];
const key = n => n.nodeType === 1 ? n.tagName + '#' + (n.id || n.dataset.key || '') : '' + n.nodeType;
function take(old, now) {
  for (const { name } of [...old.attributes]) if (!now.hasAttribute(name) && name !== 'class' && !(name === 'tabindex' && old.closest('.cells')) && !(name === 'open')) old.removeAttribute(name);
  for (const { name, value } of now.attributes) if (name !== 'class' && old.getAttribute(name) !== value) old.setAttribute(name, value);
  const classes = [...now.classList, ...own.filter(c => old.classList.contains(c))].join(' ');
  if (classes !== (old.getAttribute('class') || '')) old.setAttribute('class', classes);
  const kept = new Map();
  for (const c of old.childNodes) if (c.nodeType === 1 && (c.id || c.dataset.key)) kept.set(key(c), c);
  let at = old.firstChild;
  for (const c of [...now.childNodes]) {
    const same = kept.get(key(c)) || (at && key(at) === key(c) ? at : null);
    if (!same) { const added = document.importNode(c, true); old.insertBefore(added, at); flash(added); continue }
    if (same !== at) old.insertBefore(same, at); else at = at.nextSibling;
    if (same.nodeType === 1) { if (!same.isEqualNode(c)) { const before = same.textContent, shape = marks(same); take(same, c); if (same.textContent !== before || marks(same) !== shape) flash(same) } }
    else if (same.nodeValue !== c.nodeValue) same.nodeValue = c.nodeValue;
  }
  while (at) { const next = at.nextSibling; if (at.tagName !== 'BUTTON') at.remove(); at = next }
}
const marks = e => $$('use', e).map(u => u.getAttribute('href')).join();
function flash(e) {
  if (e.nodeType !== 1 || !e.matches('.dev,.tile,.cells>li,.att,.holders tr')) return;
  e.classList.add('flash');
  setTimeout(() => e.classList.remove('flash'), 1700);
}
const live = $('#live');
let revision = live && live.dataset.revision;
function say(on, text) {
  live.classList.toggle('on', on);
  live.classList.toggle('off', !on);
  live.lastElementChild.textContent = text;
}
async function refresh() {
  const answer = await fetch(location.pathname + location.search, { cache: 'no-store' });
  if (!answer.ok) return;
  const now = new DOMParser().parseFromString(await answer.text(), 'text/html');
  const focus = document.activeElement;
  document.title = now.title;
  document.documentElement.className = now.documentElement.className;
  for (const part of ['main', '.panels']) take($(part), $(part, now));
  const said = $('#live', now);
  revision = said.dataset.revision;
  live.dataset.live = said.dataset.live;
  say(true, said.dataset.live);
  decorate();
  if (focus && focus !== document.activeElement && focus.isConnected) focus.focus({ preventScroll: true });
}
if (live && live.dataset.events) {
  say(true, live.dataset.live);
  const events = new EventSource(live.dataset.events);
  events.addEventListener('revision', e => { if (e.data !== revision) refresh().catch(() => {}); else say(true, live.dataset.live) });
  events.onerror = () => { if (live.classList.contains('on')) say(false, 'Not live since ' + new Date().toTimeString().slice(0, 8)) };
}
decorate();
})();
