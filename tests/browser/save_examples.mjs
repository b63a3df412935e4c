// Builds every example graph in ComfyUI's page and saves it as the page does, with its picture.

import { writeFile } from 'node:fs/promises'

import { closeAll, given, loadGraph, openComfyUI } from './page.mjs'

/** The part of the window that shows the canvas and nothing over it. */
const BOX = { x: 70, y: 100, width: 1280, height: 720 }

const SETTINGS = {
  'Comfy.VueNodes.Enabled': false,
  'Comfy.Locale': 'en',
  'Comfy.Minimap.Visible': false,
  'Comfy.Graph.CanvasInfo': false,
  'LiteGraph.Canvas.MinFontSizeForLOD': 0 // text however small
}

for (const [name, { graph, note }] of Object.entries(given.examples)) {
  const { page } = await openComfyUI(given.pack, SETTINGS)
  try {
    await loadGraph(page, graph)
    const saved = await page.evaluate(arrange, { text: note, box: BOX })
    const file = `${given.folder}/${name}`
    await writeFile(`${file}.json`, `${JSON.stringify(saved, null, 1)}\n`)
    await page.waitForTimeout(1000) // text and pictures follow the canvas
    await page.screenshot({ path: `${file}.jpg`, type: 'jpeg', quality: 80, clip: BOX })
  } finally {
    await closeAll()
  }
}

/** In the page: lays the nodes out in columns below a note and shows them all in `box`. */
function arrange({ text, box }) {
  const { app, LGraphCanvas, LiteGraph } = window
  const { graph, canvas } = app
  const GAP = 50
  const depth = new Map()
  const depthOf = (node) => {
    if (!depth.has(node)) {
      const sources = (node.inputs ?? []).map((_, slot) => node.getInputNode(slot)).filter(Boolean)
      depth.set(node, Math.max(0, ...sources.map((source) => 1 + depthOf(source))))
    }
    return depth.get(node)
  }
  const columns = []
  for (const node of graph.nodes) (columns[depthOf(node)] ??= []).push(node)
  let x = 0
  for (const column of columns) {
    let y = 0
    for (const node of column) {
      if (node.type === 'LoadImage') node.size[1] = 340 // the picture is shown later
      node.pos = [x, y]
      y += node.size[1] + GAP + LiteGraph.NODE_TITLE_HEIGHT
    }
    x += Math.max(...column.map((node) => node.size[0])) + GAP
  }
  const note = LiteGraph.createNode('MarkdownNote')
  note.title = 'About this graph'
  note.widgets[0].value = text
  note.size = [420, 180]
  note.pos = [0, -note.size[1] - GAP - LiteGraph.NODE_TITLE_HEIGHT]
  graph.add(note)
  const { color, bgcolor } = LGraphCanvas.node_colors.green
  for (const node of graph.nodes)
    if (node.type.startsWith('ToMA')) Object.assign(node, { color, bgcolor })
  canvas.deselectAll()
  const top = note.pos[1] - LiteGraph.NODE_TITLE_HEIGHT
  const bottom = Math.max(...graph.nodes.map((node) => node.pos[1] + node.size[1]))
  canvas.ds.scale = Math.min(1, box.width / (x + GAP), box.height / (bottom - top + 2 * GAP))
  canvas.ds.offset = [
    (box.x + box.width / 2) / canvas.ds.scale - x / 2,
    (box.y + box.height / 2) / canvas.ds.scale - (top + bottom) / 2
  ]
  canvas.setDirty(true, true)
  return graph.serialize()
}
