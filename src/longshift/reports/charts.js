// Draws each figure of a page from its JSON as SVG, anew whenever the toolbar or the width changes. Needs nothing from a network.
'use strict'
const runs = JSON.parse(document.getElementById('runs').textContent)
const tools = runs.by && Object.assign(document.createElement('nav'), { className: 'tools' })
const state = { by: 0, smooth: runs.smooth ?? 0, logx: false, logy: false, from: -Infinity, to: Infinity }
const H = 5.2 // pixels of a digit, more or less

const figures = [...document.querySelectorAll('script.chart')].map(data => {
  const plot = data.previousElementSibling, figure = plot.closest('figure')
  const one = { ...JSON.parse(data.textContent), plot, figure, title: figure.querySelector('h2').textContent }
  const keys = figure.querySelector('.keys')
  for (const series of one.series) {
    const key = document.createElement('button')
    key.textContent = series.name
    key.className = series.style
    key.style.setProperty('--c', series.colour)
    key.onclick = () => { series.off = key.classList.toggle('off'); draw(one) }
    if (one.series.length > 1) keys.append(key)
  }
  return one
})

function shown(value) {
  const size = Math.abs(value)
  if (size >= 1e4) for (const [unit, factor] of [['P', 1e15], ['T', 1e12], ['G', 1e9], ['M', 1e6], ['k', 1e3]])
    if (size >= factor) return +(value / factor).toPrecision(4) + unit
  return size && size < 1e-3 ? (+value.toPrecision(3)).toExponential() : String(+value.toPrecision(5))
}

function ticks(low, high, log, most) {
  if (log) {
    const found = []
    for (const mantissas of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9]]) {
      found.length = 0
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
        for (const mantissa of mantissas) { const tick = mantissa * 10 ** power; if (tick >= low && tick <= high) found.push(tick) }
      if (found.length > 1) break
    }
    const every = Math.ceil(found.length / most)
    if (found.length > 1) return found.filter((_, place) => place % every === 0)
  } // a range without two round numbers has linear ticks
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough))
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999)
  const found = []
  for (let count = Math.ceil(low / step - 1e-9); count * step <= high + step * 1e-9; count++) found.push(count * step)
  return found
}

function smoothed(points) { // a mean in which older points count less and less, not drawn to its beginning
  let sum = 0, weight = 0
  return points.map(([x, y]) => {
    sum = state.smooth * sum + y
    weight = state.smooth * weight + 1
    return [x, sum / weight]
  })
}

function scale(values, log, zero, from, to) { // values to pixels
  let low = Math.min(...values), high = Math.max(...values)
  if (zero && !log) low = Math.min(0, low)
  const put = log ? Math.log : value => value
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) / 10 || 1), high + (Math.abs(high) / 10 || 1)]
  else if (to < from) high = log ? high * (high / low) ** 0.04 : high + (high - low) * 0.04
  const at = value => from + (put(value) - put(low)) / (put(high) - put(low)) * (to - from)
  return { low, high, log, at }
}

function draw(one) {
  const width = one.plot.clientWidth, height = one.plot.clientHeight
  const byRun = one.x === null
  let logx = byRun ? state.logx : one.logx
  const drawn = []
  for (const series of one.series) {
    if (series.off) continue
    const x = series.x || runs.x[series.run][state.by]
    let points = x.map((at, n) => [at, series.y[n], n]).filter(([at, y]) => y !== null && (!byRun || (at >= state.from && at <= state.to)))
    if (logx) points = points.filter(([at]) => at > 0)
    drawn.push({ series, points, curve: byRun && state.smooth && series.style === 'line' ? smoothed(points) : points })
  }
  const all = drawn.flatMap(({ points }) => points)
  one.plot.replaceChildren()
  if (!all.length) return
  const logy = (byRun ? state.logy : one.logy) && all.every(([, y]) => y > 0)
  const ys = drawn.flatMap(({ series, points }) => points.map(([, y, n]) => y * (1 + (series.band?.[n] ?? 0)))), bottom = height - 34
  const y = scale(ys, logy, one.zero, bottom, 14)
  const yTicks = ticks(y.low, y.high, logy, Math.max(2, bottom / 40))
  const left = 12 + H * 1.25 * Math.max(0, ...yTicks.map(tick => shown(tick).length))
  const xs = all.map(([x]) => x).concat(one.limit === null ? [] : [one.limit])
  const x = scale(xs, logx, false, left, width - 12)
  const most = byRun && state.by === 0 ? Math.max(1, x.high - x.low) : Infinity // no ticks between two steps
  const xTicks = ticks(x.low, x.high, logx, Math.min(most, Math.max(2, (width - left) / 80)))

  let svg = ''
  for (const tick of yTicks) svg += `<line class="axis" x1="${left}" x2="${width}" y1="${y.at(tick)}" y2="${y.at(tick)}"/>`
    + `<text x="${left - 6}" y="${y.at(tick) + 4}" text-anchor="end">${shown(tick)}</text>`
  for (const tick of xTicks) svg += `<text x="${x.at(tick)}" y="${bottom + 16}" text-anchor="middle">${shown(tick)}</text>`
  svg += `<text x="${width}" y="${bottom + 31}" text-anchor="end">${byRun ? runs.by[state.by] : one.x}</text>`
    + `<text x="0" y="6">${one.y}</text>`
  if (one.limit !== null) svg += `<line class="limit" x1="${x.at(one.limit)}" x2="${x.at(one.limit)}" y1="10" y2="${bottom}"/>`
  const path = points => points.map(([px, py], n) => `${n ? 'L' : 'M'}${x.at(px).toFixed(1)} ${y.at(py).toFixed(1)}`).join('')
  for (const { series, points, curve } of drawn) {
    const own = `style="--c:${series.colour}"`
    if (series.band) {
      const edge = side => points.map(([px, py, n]) => [px, py * (1 + side * (series.band[n] ?? 0))])
      svg += `<path class="band" ${own} d="${path(edge(1))}${path(edge(-1).reverse()).replace('M', 'L')}Z"/>`
    }
    if (series.style !== 'dots') {
      if (curve !== points) svg += `<path class="line raw" ${own} d="${path(points)}"/>`
      svg += `<path class="${series.style}" ${own} d="${path(curve)}"/>`
    }
    if (series.style === 'dots' || points.length < 12)
      for (const [px, py] of curve) svg += `<circle class="dots" ${own} r="3" cx="${x.at(px).toFixed(1)}" cy="${y.at(py).toFixed(1)}"/>`
  }
  one.plot.innerHTML = `<svg role="img" width="${width}" height="${height}">${svg}<rect class="pick" y="10" height="${bottom - 10}"/></svg>`
  one.plot.firstChild.setAttribute('aria-label', one.title) // not as markup: it may hold the name of a folder
  Object.assign(one, { drawn, scaleX: x, scaleY: y })
}

function tell(one, event) { // what is under the pointer
  const box = one.plot.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top
  const near = []
  for (const { series, curve } of one.drawn || []) {
    let best = null, least = Infinity
    for (const point of curve) {
      const away = Math.abs(one.scaleX.at(point[0]) - px) + (series.style === 'dots' ? Math.abs(one.scaleY.at(point[1]) - py) : 0)
      if (away < least) [best, least] = [point, away]
    }
    if (best) near.push({ series, best, least })
  }
  tip.hidden = !near.length
  if (!near.length) return
  near.sort((a, b) => a.least - b.least)
  const first = near[0], named = first.series.texts
  const rows = named ? [[named[first.best[2]], first]] : near.filter(({ least }) => least <= first.least + 8).map(row => [row.series.name, row])
  const head = document.createElement('div')
  head.textContent = `${one.x === null ? runs.by[state.by] : one.x}: ${shown(first.best[0])}`
  const keys = rows.map(([name, { series, best }]) => {
    const row = document.createElement('div')
    row.style.setProperty('--c', series.colour)
    row.textContent = `${name}: ${shown(best[1])}`
    return row
  })
  const list = document.createElement('div')
  list.className = 'keys'
  list.append(...keys)
  tip.replaceChildren(head, list)
  one.figure.append(tip)
  const room = one.figure.clientWidth - tip.offsetWidth
  tip.style.left = Math.max(0, Math.min(room, px + 14)) + 'px'
  tip.style.top = one.plot.offsetTop + Math.max(0, py - 20) + 'px'
}

const tip = Object.assign(document.createElement('div'), { className: 'tip', hidden: true })
const drawAll = () => figures.forEach(draw)
for (const one of figures) {
  let begin = null
  const pixel = event => event.clientX - one.plot.getBoundingClientRect().left
  const value = px => { // the step, tokens or hours at a pixel
    const { low, high, log, at } = one.scaleX, share = (px - at(low)) / (at(high) - at(low))
    return log ? low * (high / low) ** share : low + (high - low) * share
  }
  one.plot.onpointerdown = event => { if (one.x === null && event.pointerType === 'mouse') begin = pixel(event) }
  one.plot.onpointermove = event => {
    tell(one, event)
    const pick = one.plot.querySelector('.pick')
    if (begin !== null && pick) {
      pick.setAttribute('x', Math.min(begin, pixel(event)))
      pick.setAttribute('width', Math.abs(begin - pixel(event)))
    }
  }
  one.plot.onpointerup = event => {
    const ends = begin === null ? [] : [begin, pixel(event)].sort((a, b) => a - b)
    begin = null
    if (ends.length && ends[1] - ends[0] > 5) {
      [state.from, state.to] = ends.map(value)
      tools.querySelector('button').hidden = false
      drawAll()
    }
  }
  one.plot.onpointerleave = () => { tip.hidden = true; begin = null }
}
function whole() {
  [state.from, state.to] = [-Infinity, Infinity]
  tools.querySelector('button').hidden = true
}
if (tools) {
  const choices = runs.by.map((name, place) => `<label><input type="radio" name="by" value="${place}"${place ? '' : ' checked'}>${name}</label>`)
  tools.innerHTML = `<span>${choices.join('')}</span>
    <label>smooth <input type="range" name="smooth" min="0" max="0.98" step="0.02" value="${state.smooth}"></label>
    <label><input type="checkbox" name="logy">log y</label><label><input type="checkbox" name="logx">log x</label>
    <button hidden>show all</button>`
  document.querySelector('.charts').before(tools)
  tools.oninput = ({ target }) => {
    if (target.name === 'by') { state.by = +target.value; whole() }
    else state[target.name] = target.type === 'checkbox' ? target.checked : +target.value
    drawAll()
  }
  tools.querySelector('button').onclick = () => { whole(); drawAll() }
}
new ResizeObserver(drawAll).observe(document.body)
drawAll()
