// A button on each ToMA node, and an entry of its menu: a preset fills the node's widgets. Room for
// the text of a run.

import { api } from '../../../scripts/api.js'
import { app } from '../../../scripts/app.js'

/** The families of models that a node takes. */
const FAMILIES = {
  ToMAPatchModel: ['SDXL', 'Flux'],
  ToMAPatchSDXL: ['SDXL'],
  ToMAPatchFlux: ['Flux']
}

const OURS = /^(ToMA|TokenMerge)/

/** Of the text that a node shows: four lines, or five. */
const TEXT_HEIGHT = 100

let presets, texts

/** The words of the page's language, English where there are none. */
async function loadTexts() {
  const all = await api.getCustomNodesI18n()
  const locale = app.extensionManager.setting.get('Comfy.Locale')
  return { ...all.en.toma, ...all[locale]?.toma }
}

async function loadPresets() {
  // no-cache: asks whether the file has changed, as an update of the pack may have done
  const file = await fetch(new URL('presets.json', import.meta.url), { cache: 'no-cache' })
  return file.json()
}

/** Sets those widgets that the node has; undone in one step. */
function fill(node, preset) {
  node.graph.beforeChange()
  for (const [name, value] of Object.entries(preset)) {
    const widget = node.widgets.find((widget) => widget.name === name)
    if (!widget) continue
    widget.value = value
    widget.callback?.(value, app.canvas, node)
  }
  node.graph.afterChange()
  node.setDirtyCanvas(true, true)
}

/** A menu's entries: every preset of every family that the node takes. */
function entries(node) {
  const families = FAMILIES[node.comfyClass]
  return families.flatMap((family) =>
    Object.entries(presets[family]).map(([name, preset]) => ({
      content: families.length > 1 ? `${family}: ${texts[name]}` : texts[name],
      callback: () => fill(node, preset)
    }))
  )
}

/** Opens the menu below the node: Nodes 2.0 does not say where a button was clicked. */
function openMenu(node) {
  const corner = [node.pos[0], node.pos[1] + node.size[1]]
  const [x, y] = app.canvas.convertOffsetToCanvas(corner)
  const { left, top } = app.canvas.canvas.getBoundingClientRect()
  const event = new MouseEvent('click', { clientX: left + x, clientY: top + y })
  new window.LiteGraph.ContextMenu(entries(node), { event, title: texts.presets })
}

/** Grows a node of the classic canvas, where its text after a run has room for two lines alone. */
function makeRoom(id) {
  const node = app.graph.getNodeById(id)
  const text = node?.widgets?.find(({ name }) => name === '$$node-text-preview')
  if (!text || !OURS.test(node.comfyClass) || window.LiteGraph.vueNodesMode) return
  const missing = TEXT_HEIGHT - (text.computedHeight ?? TEXT_HEIGHT)
  if (missing > 0) node.setSize([node.size[0], node.size[1] + missing])
}

app.registerExtension({
  name: 'toma.presets',

  async init() {
    [presets, texts] = await Promise.all([loadPresets(), loadTexts()])
    // later, when the page has drawn the text for the first time
    api.addEventListener('progress_text', ({ detail }) =>
      setTimeout(() => makeRoom(detail.nodeId), 200))
  },

  nodeCreated(node) {
    if (!(node.comfyClass in FAMILIES)) return
    // the last widget, and in no saved or sent graph: those know the node's inputs alone
    const options = { serialize: false }
    const button = node.addWidget('button', 'presets', null, () => openMenu(node), options)
    button.label = texts.presets
    button.serialize = false
  },

  getNodeMenuItems(node) {
    if (!(node.comfyClass in FAMILIES)) return []
    const submenu = { options: entries(node) }
    return [{ content: `ToMA: ${texts.presets}`, has_submenu: true, submenu }]
  }
})
