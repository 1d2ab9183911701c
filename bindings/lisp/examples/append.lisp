;;;; Eight threads append to buffers of their own, each of which goes to a function of ours when it is full:
;;;;
;;;;     sbcl --script examples/append.lisp

(require :asdf)
(asdf:load-asd (truename (merge-pathnames "../pelton.asd" *load-truename*)))
(asdf:load-system "pelton")

(let ((buffers 0) (taken 0))
  (flet ((sink (chunks)
           ;; All of them are ours when this returns, and would come again if it signalled an error. One thread at a time is here.
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
        (format t "~:d messages, in ~:d times that there was something to take~%" taken buffers)))))
