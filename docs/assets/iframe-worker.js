// Search of a site that is opened from a folder: browsers start no worker from a file, so a hidden frame does its work.
if (location.protocol === 'file:') {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = this.onerror = null
      this.frame = document.body.appendChild(Object.assign(document.createElement('iframe'), { hidden: true }))
      addEventListener('message', event => {
        if (event.source !== this.frame.contentWindow) return
        const message = new MessageEvent('message', { data: event.data })
        this.dispatchEvent(message)
        this.onmessage?.(message)
      })
      this.loaded = new Promise(loaded => { this.frame.onload = loaded })
      const page = this.frame.contentDocument
      page.open()
      page.write(`<html><body><script>
        postMessage = data => parent.postMessage(data, '*')
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise(loaded => {
          document.body.appendChild(Object.assign(document.createElement('script'), { src: url, onload: loaded }))
        })), Promise.resolve())
      <\/script><script src="${url}"><\/script></body></html>`)
      page.close()
    }
    postMessage(data) { this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent('message', { data }))) }
    terminate() { this.frame.remove() }
  }
}
