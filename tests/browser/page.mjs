// A browser on a running ComfyUI, and what a person does in it.

import { createRequire } from 'node:module'

/** What `tools/browser.py` passes on: addresses, paths and graphs. */
export const given = JSON.parse(process.env.TOMA_BROWSER)
const { chromium } = createRequire(`${given.npm}/`)('playwright-core')

const FLAGS = [
  '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
  '--disable-background-networking', '--disable-component-update', '--disable-sync'
]
const SETTINGS = {
  'Comfy.TutorialCompleted': true, // no dialog of templates over the canvas
  'Comfy.RightSidePanel.IsOpen': false // an error of the browser before may have opened it
}

const browsers = []

/** Opens ComfyUI with the user's settings changed to `settings`; collects console errors. */
export async function openComfyUI(url, settings) {
  await fetch(`${url}/settings`, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify({ ...SETTINGS, ...settings })
  })
  const browser = await chromium.launch({ executablePath: given.chromium, args: FLAGS })
  browsers.push(browser)
  const page = await browser.newPage({ viewport: { width: 1400, height: 900 } })
  page.setDefaultTimeout(30_000)
  const errors = new Set()
  const note = (text, where = '') =>
    errors.add(`${text.split('\n')[0]} ${where}`.replaceAll(url, '')) // the trace may differ
  page.on('console', (message) => {
    if (message.type() === 'error') note(message.text(), message.location().url)
  })
  page.on('pageerror', (error) => note(String(error)))
  await page.goto(url)
  // last of all a page that is new to its user shows ComfyUI's own first graph
  await page.waitForFunction(() => window.app?.vueAppReady && window.app.graph?.nodes.length)
  return { page, errors }
}

/** Closes every browser that is open. */
export const closeAll = () => Promise.all(browsers.splice(0).map((browser) => browser.close()))

/** Puts a graph in ComfyUI's API format in the place of the present one. */
export async function loadGraph(page, graph) {
  await page.evaluate((graph) => {
    window.app.canvas.setGraph(window.app.graph) // out of any subgraph
    window.app.loadApiJson(graph, 'test')
  }, graph)
  await page.waitForFunction(
    (size) => window.app.graph.nodes.length === size,
    Object.keys(graph).length
  )
}

/** Searches for a node, adds it and puts it down at a free place; returns its id. */
export async function addBySearch(page, name, kind) {
  const place = await openSearch(page)
  await page.keyboard.type(name)
  // the name alone on its line: other names may begin with it
  const best = page.locator('#result-item-0').filter({ hasText: new RegExp(`^${name}(?![ (])`) })
  await best.click()
  await page.locator('#results-list').waitFor({ state: 'detached' })
  await page.mouse.move(...place, { steps: 3 }) // it hangs at the pointer until a click
  await page.mouse.click(...place)
  await page.waitForFunction(() => !window.app.graph.nodes.at(-1).flags.ghost)
  const added = await page.evaluate(() => {
    const { id, type } = window.app.graph.nodes.at(-1)
    return { id, type }
  })
  if (added.type !== kind) throw new Error(`the search for ${name} added a ${added.type}`)
  return added.id
}

/** Shows a node alone in the middle of the window, whole. */
export async function lookAt(page, id) {
  await page.evaluate((id) => {
    const { canvas, graph } = window.app
    const node = graph.getNodeById(id)
    canvas.ds.scale = 1
    canvas.ds.offset = [
      600 - node.pos[0] - node.size[0] / 2,
      400 - node.pos[1] - node.size[1] / 2
    ]
    canvas.setDirty(true, true)
  }, id)
  await page.waitForTimeout(300) // one drawing of the canvas, and the widgets over it
}

/** Clicks on the title of a node. */
export async function select(page, id) {
  await lookAt(page, id)
  await page.mouse.click(...(await placeOn(page, id, 60, -15)))
}

/** Opens the menu of a node by a right click on its title. */
export async function openNodeMenu(page, id) {
  await lookAt(page, id)
  await page.mouse.click(...(await placeOn(page, id, 60, -15)), { button: 'right' })
}

/** Clicks on a button of a node by its label. */
export async function clickButton(page, id, label) {
  await lookAt(page, id)
  const button = page.getByRole('button', { name: label, exact: true })
  if (await button.count()) return button.click() // Nodes 2.0; the classic canvas draws its own
  const y = await page.evaluate(([id, label]) => {
    const { widgets } = window.app.graph.getNodeById(id)
    return widgets.find((widget) => widget.type === 'button' && widget.label === label).last_y
  }, [id, label])
  await page.mouse.click(...(await placeOn(page, id, 60, y + 10)))
}

/** The place in the window of a place on a node. */
const placeOn = (page, id, right, down) => page.evaluate(([id, right, down]) => {
  const { canvas, graph } = window.app
  const { pos } = graph.getNodeById(id)
  const [x, y] = canvas.convertOffsetToCanvas([pos[0] + right, pos[1] + down])
  const { left, top } = canvas.canvas.getBoundingClientRect()
  return [left + x, top + y]
}, [id, right, down])

/** Presses Run and waits for the end of the run; throws what ComfyUI reports. */
export async function run(page) {
  await page.evaluate(() => {
    window.ended = undefined
    for (const name of ['execution_success', 'execution_error', 'execution_interrupted'])
      window.app.api.addEventListener(name, ({ detail }) => (window.ended = { name, detail }))
  })
  await page.getByTestId('queue-button').click()
  const ended = await page.waitForFunction(() => window.ended)
  const { name, detail } = await ended.jsonValue()
  if (name !== 'execution_success') throw new Error(`${name}: ${detail.exception_message}`)
}

/** Waits until a node shows a picture; returns its width and height. */
export async function pictureOn(page, id) {
  const size = await page.waitForFunction((id) => {
    const image = window.LiteGraph.vueNodesMode
      ? document.querySelector(`.lg-node[data-node-id="${id}"] img`)
      : window.app.graph.getNodeById(id).imgs?.[0]
    return image?.naturalWidth && [image.naturalWidth, image.naturalHeight]
  }, id)
  return size.jsonValue()
}

/** Keeps what the window shows as a picture for people. */
export const picture = (page, name) => page.screenshot({ path: `${given.pictures}/${name}.png` })

/** Double-clicks the bare canvas below all nodes until the search opens; returns the place. */
async function openSearch(page) {
  const place = [500, 400]
  for (let tries = 0; tries < 5; tries++) {
    await page.evaluate(([x, y]) => {
      const { canvas, graph } = window.app
      const bottom = Math.max(0, ...graph.nodes.map((node) => node.pos[1] + node.size[1]))
      canvas.ds.scale = 1
      canvas.ds.offset = [x, y - 200 - bottom]
      canvas.setDirty(true, true)
    }, place)
    await page.waitForTimeout(300)
    await page.mouse.dblclick(...place)
    try {
      await page.locator('#results-list').waitFor({ timeout: 3000 })
      return place
    } catch {
      // a page that is still starting may move the canvas meanwhile
    }
  }
  throw new Error('a double click on the canvas opens no search')
}
