;;;; Eight threads append to buffers of their own, which go to a function when they are full:
;;;;
;;;;     sbcl --script examples/append.lisp

(require :asdf)
(asdf:load-asd (truename (merge-pathnames "../pelton.asd" *load-truename*)))
(asdf:load-system "pelton")

(let ((buffers 0) (taken 0))
  (flet ((sink (chunks)
           ;; It has them all when it returns; after an error they would come again. One thread at a time calls it.
           (incf buffers)
           (pelton:do-chunks ((sap size :messages messages) chunks)
             (incf taken messages))))
    (pelton:with-appenders (appenders #'sink :flush-bytes (* 1024 1024))
      (let ((threads (loop for thread below 8
                           collect (let ((thread thread))
                                     (sb-thread:make-thread
                                      (lambda ()
                                        (dotimes (i 100000)
                                          (pelton:with-reserved ((sap size) appenders 16)
                                            (setf (sb-sys:sap-ref-64 sap 0) thread
                                                  (sb-sys:sap-ref-64 sap 8) i)))))))))
        (mapc #'sb-thread:join-thread threads)
        ;; On demand.
        (pelton:flush appenders)
        (format t "~:d messages in ~:d flushes~%" taken buffers)))))
